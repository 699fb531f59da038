"""deploy/package/image_sbom.py: the packages that dpkg's status file says are installed."""

from __future__ import annotations

from deploy.package.image_sbom import system_packages

STATUS = """Package: libstdc++6
Status: install ok installed
Architecture: amd64
Version: 12.2.0-14+deb12u1
Description: GNU Standard C++ Library v3
 This package: has the library.

Package: removed
Status: deinstall ok config-files
Architecture: all
Version: 1

Package: tzdata
Status: install ok installed
Architecture: all
Version: 2:2025b-0
Conffiles:
 /etc/x 123
"""


def test_what_is_installed_is_listed_with_a_purl_and_what_was_removed_is_not() -> None:
    found = list(system_packages(STATUS, "debian", "12"))
    assert [(each["name"], each["version"]) for each in found] == [
        ("libstdc++6", "12.2.0-14+deb12u1"),
        ("tzdata", "2:2025b-0"),
    ]
    assert found[0]["purl"] == "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=amd64&distro=debian-12"
    assert found[1]["purl"] == "pkg:deb/debian/tzdata@2:2025b-0?arch=all&distro=debian-12"
