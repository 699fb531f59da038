"""Prints what is wrong with manifests: `schemas_program.py VERSION POOL`; its input is `[manifests, pools]` as JSON.

It runs in an environment of its own, which has the packages that it imports.
"""

import functools
import json
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import yaml


def main() -> None:
    """Check Kubernetes' own kinds, with no field that is unknown, and InferencePools."""
    manifests, pools = json.load(sys.stdin)
    # It would read a file of 1.5 MB for each manifest.
    kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
    for each in manifests:
        try:
            kubernetes_validate.validate(each, sys.argv[1], strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as wrong:
            print(f"{each['kind']} {each['metadata']['name']}: {getattr(wrong, 'path', '')} {wrong.message}")
    [version] = yaml.safe_load(Path(sys.argv[2]).read_text(encoding="utf-8"))["spec"]["versions"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    for each in pools:
        for fault in jsonschema.Draft202012Validator(schema).iter_errors(each):
            print(f"{each['kind']} {each['metadata']['name']}: {fault.json_path} {fault.message}")


def closed(schema: object) -> object:
    """Return a schema whose objects have no property that it does not name, as `kubectl` warns of those."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(each) for name, each in schema.items()}
    if isinstance(found.get("properties"), dict) and "type" in found:
        found.setdefault("additionalProperties", False)
    return found


if __name__ == "__main__":
    main()
