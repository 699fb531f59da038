from __future__ import annotations

import msgspec
import pytest

from services.frontend.protocol.forms import MOST_PARTS, form_as_json
from shared.errors import InvalidRequest

KIND = 'multipart/form-data; boundary="b b"'


def part(name: str, value: str, *, more: str = "") -> bytes:
    return f'--b b\r\n{more}Content-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


def test_fields_are_texts_and_numbers() -> None:
    parts = [
        part("prompt", "7\n--b b\r\nfür"),
        part("seed", "9", more="Content-Type: text/plain\r\n"),
        part("guidance", "2.5"),
        part("stream", "true"),
        part("model", "1"),
    ]
    found = form_as_json(KIND, b"before\r\n" + b"".join(parts) + b"--b b--\r\nafter", ())
    assert msgspec.json.decode(found) == {
        **{"prompt": "7\n--b b\r\nfür", "seed": 9, "guidance": 2.5},
        **{"stream": True, "model": "1"},
    }


def file(name: str, content: bytes, kind: str = "image/png") -> bytes:
    head = f'--b b\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\nContent-Type: {kind}\r\n\r\n'
    return head.encode() + content + b"\r\n"


def test_files_are_data_uris_and_several_of_one_name_a_list() -> None:
    content = b"\x89PNG\r\n\xff"
    body = file("image[]", content) + file("image[]", b"x", "image/webp; a=b") + file("mask", b"y") + b"--b b--"
    assert msgspec.json.decode(form_as_json(KIND, body, ("image", "mask"))) == {
        "image": ["data:image/png;base64,iVBORw0K/w==", "data:image/webp;base64,eA=="],
        "mask": "data:image/png;base64,eQ==",
    }
    for names, several in ((("image[]",), True), (("image", "image"), True), (("image",), False)):
        form = b"".join(file(name, b"x") for name in names) + b"--b b--"
        found = msgspec.json.decode(form_as_json(KIND, form, ("image",)))["image"]
        assert found == (["data:image/png;base64,eA=="] * len(names) if several else "data:image/png;base64,eA==")
    with pytest.raises(InvalidRequest, match="prompt: this field takes no file"):
        form_as_json(KIND, file("prompt", b"x") + b"--b b--", ("image",))


def test_a_file_input_in_which_nothing_was_chosen_is_left_out() -> None:
    empty = file("mask", b"", "application/octet-stream").replace(b'"a.png"', b'""')
    body = file("image", b"x") + empty + empty.replace(b"mask", b"more") + b"--b b--"
    assert msgspec.json.decode(form_as_json(KIND, body, ("image", "mask"))) == {"image": "data:image/png;base64,eA=="}
    named = file("mask", b"") + b"--b b--"
    assert msgspec.json.decode(form_as_json(KIND, named, ("mask",))) == {"mask": "data:image/png;base64,"}


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (KIND, part("x", "1") * (MOST_PARTS + 1) + b"--b b--", "more than 48 fields"),
        (KIND, part("x", "1") * 80_000, "more than 48 fields"),
        (KIND, b"--b b\r\n" + b"a: b\r\n" * 100_000 + b"\r\n1\r\n--b b--", "takes no file"),
        (KIND, part("x", "1", more="Content-Type: multipart/mixed; boundary=c\r\n") + b"--b b--", ""),
        (KIND, b"--other", "no form"),
        ("multipart/form-data", b"--b", "no form"),
        (KIND, b"--b b\r\nContent-Disposition: form-data; name=a\r\n\r\n\xff\r\n--b b--", "not UTF-8"),
    ],
)
def test_a_form_that_is_none_or_too_large_is_refused(kind: str, body: bytes, said: str) -> None:
    if not said:
        assert form_as_json(kind, body, ()) == b'{"x":1}'
        return
    with pytest.raises(InvalidRequest, match=said):
        form_as_json(kind, body, ())


def test_forms_within_forms_are_texts() -> None:
    """A parser that goes into them would go as deep as a client likes."""
    inner = "".join(
        f"--c{depth}\r\nContent-Type: multipart/mixed; boundary=c{depth + 1}\r\n\r\n" for depth in range(3_000)
    )
    body = part("prompt", inner, more="Content-Type: multipart/mixed; boundary=c0\r\n") + b"--b b--"
    assert msgspec.json.decode(form_as_json(KIND, body, ())) == {"prompt": inner}
