"""Reads the images that pictures and videos are made from, for /v1/images/edits and `input_reference` of /v1/videos.

    image, mask ─▶ images/reader.py: PNG files of the picture's width and height ─▶ Picture.images, Picture.mask

Without a `size` a picture has the shape of its first image, and about as many pixels as the model's own size. Several
images keep their shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import Struct, UnsetType
from msgspec.structs import replace

from services.frontend.images.decoding import PictureShape, Prepared
from services.frontend.images.reader import ImageReader
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.parts import ImageReference, ImageSource, image_of
from services.frontend.protocol.pictures import MOST_SIDE, PictureEditRequest
from services.frontend.protocol.videos import VideoRequest
from services.frontend.serving.request_context import RequestContext
from shared.messages.generate import Picture

_REST_BYTES = 256 << 10
"""Most bytes of a message to a worker without its images."""
_URLS = ("data:", "http:", "https:")


class GivenImages(Struct, frozen=True):
    """The images of a request, before they are read."""

    images: Sequence[ImageSource]
    masks: Sequence[ImageSource]
    """The mask, or none."""
    is_auto: bool
    """Whether the request names no size."""


class EditImages(Struct, frozen=True):
    """Reads the images of requests for pictures from images."""

    reader: ImageReader

    def check(self, given: GivenImages) -> None:
        """Check the images as far as their URLs say what they are. Raise InvalidRequest."""
        self.reader.check(given.images)
        self.reader.check(given.masks)

    async def read(self, given: GivenImages, picture: Picture, multiple: int, context: RequestContext) -> Picture:
        """Return the picture with its images, and with the size that follows from them. `picture` has the size of the
        request, or the model's own; both sides are multiples of `multiple`. Raise InvalidRequest, Overloaded and
        Unavailable."""
        shape = PictureShape(picture.width, picture.height, multiple, MOST_SIDE)
        keeps_shape = given.is_auto or len(given.images) > 1
        shown: list[Prepared] = []
        for source in given.images:  # one after the other: no more are held than fit into a message
            shown += await self._read((source,), replace(shape, keeps_shape=keeps_shape), context)
            self._check_payload(source, shown)
        if given.is_auto:
            picture = replace(picture, width=shown[0].width, height=shown[0].height)
        wanted = replace(shape, width=picture.width, height=picture.height, is_mask=True)
        masks = await self._read(given.masks, wanted, context)
        for mask in masks:
            if mask.shape != shown[0].shape:
                (width, height), (across, down) = mask.shape, shown[0].shape
                raise field_error("mask", f"has {width} by {height} pixels, and the image has {across} by {down}")
            self._check_payload(given.images[0], (*shown, *masks))
        size = sum(len(one.pixels) for one in (*shown, *masks))
        context.permit.add_bytes(size)
        images, mask_file = tuple(one.pixels for one in shown), b"".join(one.pixels for one in masks)
        return replace(picture, images=images, mask=mask_file)

    def _check_payload(self, source: ImageSource, read: Sequence[Prepared]) -> None:
        """Raise InvalidRequest, which names an image, if what was read until now does not fit into a message."""
        size = sum(len(one.pixels) for one in read)
        if size + _REST_BYTES > (limit := self.reader.prepared_limit):
            why = f"prepared, the images have {size} bytes, too many for nats.payload_limit_bytes"
            mend = f"{limit}; ask for a smaller size"
            raise field_error(source.where, f"{why}, {mend}", "request_too_large", status=413)

    async def _read(
        self, sources: Sequence[ImageSource], shape: PictureShape, context: RequestContext
    ) -> list[Prepared]:
        waiting = partial(context.permit.waiting, "images")
        return await self.reader.read(sources, shape, key=context.permit.key, salt=context.salt(None), waiting=waiting)


def images_of_edit(request: PictureEditRequest) -> GivenImages:
    """Return the images of a request for pictures. Raise InvalidRequest."""
    field = "images" if isinstance(request.image, UnsetType) else "image"
    images = (
        (_source("image", request.image, "the image"),)
        if isinstance(request.image, str)
        else tuple(
            _source(f"{field}[{index}]", image, f"image {index + 1}") for index, image in enumerate(request.given)
        )
    )
    masks = () if request.mask is None else (_source("mask", request.mask, "the mask"),)
    return GivenImages(images, masks, request.size in (None, "auto"))


def images_of_video(request: VideoRequest) -> GivenImages | None:
    """Return the image of a request for a video. None if it has none. Raise InvalidRequest."""
    if request.input_reference is None:
        return None
    image = _source("input_reference", request.input_reference, "the image")
    return GivenImages((image,), (), request.size in (None, "auto"))


def _source(where: str, image: str | ImageReference, name: str) -> ImageSource:
    """Return an image that is a URL, or is the base64 of one. Raise InvalidRequest if it is a reference to nothing."""
    source = ImageSource(where, image, name) if isinstance(image, str) else replace(image_of(image, where), name=name)
    is_url = source.url[:8].lower().startswith(_URLS)
    return source if is_url else replace(source, url=f"data:;base64,{source.url}")
