"""The keys of groups as plain values, and back."""

from collections.abc import Mapping

from gp_orff.data.patterns import Components, GroupKey, LineOfSight, Pattern


def pack_key(key: GroupKey) -> dict:
    pattern: Pattern = key.pattern
    columns = list(pattern.columns) if isinstance(pattern, Components) else None
    outputs = pattern.num_outputs
    return {"label": key.label, "columns": columns, "num_outputs": outputs, "known": key.known}


def unpack_key(content: Mapping) -> GroupKey:
    columns, outputs = content["columns"], content["num_outputs"]
    pattern = LineOfSight(outputs) if columns is None else Components(tuple(columns), outputs)
    return GroupKey(content["label"], pattern, content.get("known", False))
