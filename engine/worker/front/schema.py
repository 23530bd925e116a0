"""`response_format` checked by shape.

Owns the bound on schema size and the refusal of formats that need constrained decoding. Always holds:
checking takes time in proportion to the schema's size, which is bounded; a broken schema and an unsupported
format are both a 400 that names `response_format`.
"""

from __future__ import annotations

from typing import Any

from engine.worker.front.errors import invalid, unsupported

MAX_NODES = 20_000
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_CHILD_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_CHILD_MAPS = ("properties", "$defs", "definitions", "patternProperties")
_CHILDREN = ("items", "additionalProperties", "not", "contains", "if", "then", "else", "propertyNames")
_PARAM = "response_format"


def check_response_format(value: Any) -> None:
    """Accept null and {"type": "text"}; refuse everything else by name."""
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return
    if kind == "json_schema":
        described = value.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(described, dict) or not isinstance(described.get("name"), str):
            raise invalid(_PARAM, "'json_schema' must be an object with a 'name' and a 'schema'.")
        if schema is not None:
            _check_schema(schema)
    elif kind != "json_object":
        raise invalid(_PARAM, "'type' must be 'text', 'json_object' or 'json_schema'.")
    raise unsupported(_PARAM, f"'{kind}' needs constrained decoding, which is not available.")


def _check_schema(root: Any) -> None:
    todo: list[tuple[str, Any]] = [("schema", root)]
    seen = 0
    while todo:
        path, node = todo.pop()
        seen += 1
        if seen > MAX_NODES:
            raise invalid(_PARAM, f"the schema has more than {MAX_NODES} parts.")
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise invalid(_PARAM, f"{path} is not a schema.")
        kinds = node.get("type", [])
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if not isinstance(kind, str) or kind not in _TYPES:
                raise invalid(_PARAM, f"{path}.type is not a JSON type.")
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(item, str) for item in required):
            raise invalid(_PARAM, f"{path}.required must be a list of strings.")
        if not isinstance(node.get("enum", []), list):
            raise invalid(_PARAM, f"{path}.enum must be a list.")
        for key in _CHILD_MAPS:
            children = node.get(key, {})
            if not isinstance(children, dict):
                raise invalid(_PARAM, f"{path}.{key} must be an object.")
            todo.extend((f"{path}.{key}.{name[:40]}", child) for name, child in children.items())
        for key in _CHILD_LISTS:
            branches = node.get(key, [])
            if not isinstance(branches, list):
                raise invalid(_PARAM, f"{path}.{key} must be a list.")
            todo.extend((f"{path}.{key}[{index}]", child) for index, child in enumerate(branches))
        todo.extend((f"{path}.{key}", node[key]) for key in _CHILDREN if key in node)
