"""The files of the page: what they may contain, so that the policy holds."""

from __future__ import annotations

import re
from pathlib import Path

from services.frontend.ui.files import HEADERS, PATH, POLICY, page_files

FOLDER = Path(__file__).parents[3] / "services" / "frontend" / "ui" / "page"


def text(path: str) -> str:
    return page_files()[path].content.decode()


def test_every_file_of_the_folder_is_served_with_its_type() -> None:
    served = page_files()
    assert len(served) == len(list(FOLDER.iterdir()))
    assert served[PATH].content_type == "text/html"
    assert {served[path].content_type for path in served if path.endswith(".js")} == {"text/javascript"}


def test_all_that_the_page_names_is_served_and_nothing_comes_from_elsewhere() -> None:
    named = re.findall(r'(?:src|href)="([^"]+)"', text(PATH))
    assert named
    assert {f"/{each}" for each in named if not each.startswith("#")} <= set(page_files())
    for path, file in page_files().items():
        if file.content_type == "text/javascript":
            modules = re.findall(r'from "\./([^"]+)"', file.content.decode())
            assert {f"{PATH}/{each}" for each in modules} <= set(page_files()), path
        addresses = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", file.content.decode())
        assert [each for each in addresses if "www.w3.org" not in each] == [], path


def test_nothing_is_inline_and_no_text_becomes_markup() -> None:
    page = text(PATH)
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=|javascript:", page)
    for path, file in page_files().items():
        if file.content_type == "text/javascript":
            forbidden = (
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setAttribute\(\"style"
            )
            assert not re.search(forbidden, file.content.decode()), path


def test_the_policy_allows_no_inline_code_no_other_host_and_no_frame() -> None:
    rules = {rule.split(" ")[0]: rule.split(" ")[1:] for rule in POLICY.split("; ")}
    assert rules["default-src"] == ["'none'"]
    assert rules["frame-ancestors"] == ["'none'"]
    assert {source for rule in rules.values() for source in rule} == {"'none'", "'self'", "'script'"}
    assert HEADERS["X-Frame-Options"] == "DENY"
    assert HEADERS["Referrer-Policy"] == "no-referrer"
