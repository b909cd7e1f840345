"""Holds files and values against the schemas of those who will read them.

    schemas.py manifests CRDS VERSION...  < manifests.yaml
        Each manifest against Kubernetes VERSION, or against the CustomResourceDefinition of its kind in the directory
        CRDS. A field that a schema does not know is an error, as it is for the API server.
    schemas.py dashboard < dashboard.json
        Every field must survive the way through Grafana's own model of a dashboard.
    schemas.py values  < lines of [SCHEMA, VALUE]
        Each value against its JSON Schema: prints a list of what is wrong per line, at once.

The first two say what was checked, a line each; on standard error what is wrong, and then they end with 1.
"""

import functools
import json
import pathlib
import sys

import yaml

wrong = []


def strict(schema):
    """An object's fields are those that are listed, unless the schema says that it keeps others."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: strict(part) for key, part in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    return schema


def custom(directory):
    """The schemas of custom resources, by apiVersion and kind."""
    found = {}
    for file in sorted(pathlib.Path(directory).iterdir()):
        for definition in yaml.safe_load_all(file.read_text()):
            spec = definition["spec"]
            for version in spec["versions"]:
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"].update({"apiVersion": {}, "kind": {}, "metadata": {}})
                found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def manifests(directory, versions):
    import jsonschema
    import kubernetes_validate

    crds = custom(directory)
    for manifest in yaml.safe_load_all(sys.stdin):
        if manifest is None:
            continue
        kind = manifest["apiVersion"], manifest["kind"]
        name = f"{manifest['kind']} {manifest['metadata']['name']}"
        if kind in crds:
            for error in jsonschema.Draft202012Validator(crds[kind]).iter_errors(manifest):
                wrong.append(f"{name}: {error.json_path}: {error.message}")
            print(f"{name}: {kind[0]}")
            continue
        for version in versions:
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                wrong.append(f"{name}: Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message}")
        print(f"{name}: Kubernetes {', '.join(versions)}")


def lost(before, after, path):
    """The paths of what is in the one and not in the other; what says nothing may go."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key in after:
                yield from lost(value, after[key], f"{path}.{key}")
            elif value not in (None, "", [], {}):
                yield f"{path}.{key}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (one, other) in enumerate(zip(before, after)):
            yield from lost(one, other, f"{path}[{place}]")
    elif before != after:
        yield path


def dashboard():
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    before = json.load(sys.stdin)
    after = json.loads(JSONEncoder().encode(Dashboard.from_json(before)))
    wrong.extend(f"Grafana knows no {path}" for path in lost(before, after, "dashboard"))
    print(f"{len(before['panels'])} panels")


def values():
    import jsonschema

    @functools.cache
    def validator(text):
        schema = json.loads(text)
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
        return kind(schema)

    for line in sys.stdin.buffer:
        schema, value = json.loads(line)
        errors = validator(json.dumps(schema)).iter_errors(value)
        print(json.dumps([f"{error.json_path}: {error.message}" for error in errors]), flush=True)


if sys.argv[1] == "manifests":
    manifests(sys.argv[2], sys.argv[3:])
elif sys.argv[1] == "values":
    values()
else:
    dashboard()
for line in wrong:
    print(line, file=sys.stderr)
sys.exit(bool(wrong))
