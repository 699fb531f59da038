"""Writes the folder golden: small images, and the SHA-256 of what transformers' processors make of them as people see
them: upright, on white, with 8 bits.

Run with a Python that has transformers, NumPy and Pillow: `PYTHONPATH=. python tests/frontend/images/golden.py`. It was
run with transformers 5.19.0 and Pillow 13.0.0.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"
SHAPES: dict[str, dict[str, Any]] = {
    "clip": {"width": 14, "height": 14, "resize": 14, "filter": "BICUBIC"},
    "odd": {"width": 11, "height": 15, "resize": 17, "filter": "BICUBIC"},
    "small": {"width": 16, "height": 13, "resize": 7, "filter": "BILINEAR"},
    "whole": {"width": 12, "height": 10, "resize": 0, "filter": "LANCZOS"},
}
"""How images are prepared, by the fields of an ImageInput."""
SIZED: dict[str, dict[str, Any]] = {
    "qwen": {"unit": 8, "least_pixels": 4 * 64, "most_pixels": 9 * 64, "filter": "BICUBIC"},
    "grown": {"unit": 28, "least_pixels": 56 * 56, "most_pixels": 28 * 28 * 1280, "filter": "BICUBIC"},
}
"""The same for images that keep their shape."""
SIZES = [(width, height) for width in (1, 5, 27, 28, 41, 42, 43, 199, 1000, 4032) for height in (1, 14, 57, 700, 3024)]


def write_images() -> None:
    """Write an image of each kind."""
    from PIL import Image

    def drawn(width: int, height: int) -> Any:
        image = Image.new("RGB", (width, height))
        image.putdata([(x * 7 % 256, y * 11 % 256, (x * y) % 256) for y in range(height) for x in range(width)])
        return image

    wide, tall = drawn(41, 23), drawn(19, 37)
    clear = wide.convert("RGBA")
    clear.putalpha(wide.convert("L"))
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by 90 degrees
    wide.save(FOLDER / "rgb.png")
    tall.save(FOLDER / "tall.jpg", quality=90)
    wide.save(FOLDER / "turned.jpg", exif=turned)
    wide.convert("CMYK").save(FOLDER / "cmyk.jpg")
    clear.save(FOLDER / "clear.png")
    clear.save(FOLDER / "clear.webp", lossless=True)
    wide.save(FOLDER / "lossy.webp")
    wide.convert("L").save(FOLDER / "grey.png")
    wide.convert("1").save(FOLDER / "bits.png")
    wide.convert("P", palette=Image.Palette.ADAPTIVE).save(FOLDER / "palette.png", transparency=3)
    Image.frombytes("I;16", (8, 30), bytes(range(240)) * 2).save(FOLDER / "deep.png")
    frames = [wide.convert("P"), tall.resize((41, 23)).convert("P")]
    frames[0].save(FOLDER / "frames.gif", save_all=True, append_images=frames[1:])


def shown(path: Path) -> Any:
    """Return an image as people see it."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode == "I;16":
        return Image.frombytes("L", image.size, image.tobytes()[1::2])  # the upper byte of each
    if not image.has_transparency_data:
        return image
    white, clear = Image.new("RGB", image.size, (255, 255, 255)), image.convert("RGBA")
    white.paste(clear, mask=clear)
    return white


def expected(path: Path, shape: dict[str, Any]) -> bytes:
    """Return what transformers makes of an image."""
    import numpy as np

    if "unit" in shape:
        return in_units(shown(path), shape)
    clip = importlib.import_module("transformers.models.clip.image_processing_pil_clip")
    cut = {"height": shape["height"], "width": shape["width"]}
    processor = clip.CLIPImageProcessorPil(
        size={"shortest_edge": shape["resize"]} if shape["resize"] else cut,
        crop_size=cut,
        resample=importlib.import_module("PIL.Image").Resampling[shape["filter"]],
        do_rescale=False,
        do_normalize=False,
    )
    [pixels] = processor(shown(path))["pixel_values"]
    return np.asarray(pixels).transpose(1, 2, 0).astype(np.uint8).tobytes()


def in_units(image: Any, shape: dict[str, Any]) -> bytes:
    """Return the pixels that Qwen2-VL's processor makes of an image, which it returns as patches."""
    import numpy as np

    qwen = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    patch = shape["unit"] // 2
    processor = qwen.Qwen2VLImageProcessorPil(
        size={"shortest_edge": shape["least_pixels"], "longest_edge": shape["most_pixels"]},
        patch_size=patch,
        merge_size=2,
        do_rescale=False,
        do_normalize=False,
    )
    found = processor(image)
    _, rows, columns = found["image_grid_thw"][0]
    patches = np.asarray(found["pixel_values"]).reshape(rows // 2, columns // 2, 2, 2, 3, 2, patch, patch)
    pixels = patches[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4)
    return pixels.reshape(rows * patch, columns * patch, 3).astype(np.uint8).tobytes()


def sizes_of(shape: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return to which width and height transformers resizes pictures of SIZES, where it does."""
    qwen = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    found: dict[str, tuple[int, int]] = {}
    for width, height in SIZES:
        if max(width, height) <= 200 * min(width, height):
            bounds = {"min_pixels": shape["least_pixels"], "max_pixels": shape["most_pixels"]}
            tall, wide = qwen.smart_resize(height, width, shape["unit"], **bounds)
            found[f"{width} {height}"] = wide, tall
    return found


def main() -> None:
    """Write all of it."""
    FOLDER.mkdir(exist_ok=True)
    write_images()
    found = {
        f"{path.name} {name}": hashlib.sha256(expected(path, shape)).hexdigest()
        for path in sorted(FOLDER.glob("*.*"))
        if path.suffix != ".json"
        for name, shape in (SHAPES | SIZED).items()
    }
    (FOLDER / "pixels.json").write_text(json.dumps(found, indent=0) + "\n")
    sizes = {name: sizes_of(shape) for name, shape in SIZED.items()}
    (FOLDER / "sizes.json").write_text(json.dumps(sizes, indent=0) + "\n")


if __name__ == "__main__":
    main()
