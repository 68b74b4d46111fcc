"""From the fields of a request that constrain its answer to one constraint, and back from its errors to the field."""

from __future__ import annotations

from typing import Any

from treadle.ir.errors import UserError
from treadle.runtime.structured.constraint import StructuredOutputsParams
from treadle.server.errors import ApiError, as_api_error, bad_request
from treadle.server.schemas import ResponseFormat, SamplingBody

RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""Fields that vLLM's server took before `structured_outputs` -> the fields that took their place."""


def structured_outputs(body: SamplingBody) -> StructuredOutputsParams | None:
    """The constraint that a request asks for, if any. Raises ApiError naming the field."""
    asked = _asked(body)
    if not asked:
        return None
    if len(asked) > 1:
        raise bad_request(f"{' and '.join(asked)} both constrain the answer; send one of them", list(asked)[1])
    ((field, arguments),) = asked.items()
    unknown = [name for name in arguments if name not in StructuredOutputsParams.__struct_fields__]
    if unknown:
        known = ", ".join(StructuredOutputsParams.__struct_fields__)
        raise bad_request(f"{field} has no field {unknown[0][:64]!r}; it takes {known}", field)
    try:
        return StructuredOutputsParams(**arguments)
    except UserError as error:
        raise constraint_error(error, body) from error


def constraint_error(error: UserError, body: SamplingBody) -> ApiError:
    """The answer for an error; one about the constraint names the field that the request used for it."""
    known = as_api_error(error)
    if known.param == "structured_outputs" and (asked := _asked(body)):
        field = next(iter(asked))
        known.param = field
        known.message = known.message.replace("structured_outputs: ", f"{field}: ", 1)
    return known


def _asked(body: SamplingBody) -> dict[str, dict[str, Any]]:
    """Field of the request -> arguments of StructuredOutputsParams."""
    asked: dict[str, dict[str, Any]] = {}
    if body.response_format is not None and body.response_format.type != "text":
        asked["response_format"] = _from_format(body.response_format)
    if body.structured_outputs is not None:
        asked["structured_outputs"] = body.structured_outputs
    for old, new in _GUIDED.items():
        if (value := getattr(body, old)) is not None:
            asked[old] = {new: value}
    return asked


def _from_format(form: ResponseFormat) -> dict[str, Any]:
    if form.type == "json_object":
        return {"json_object": True}
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            what = "response_format of type 'json_schema' needs json_schema with a name and a schema"
            raise bad_request(what, "response_format")
        return {"json": form.json_schema.schema_}
    if form.type == "structural_tag":
        return {"structural_tag": {"type": form.type, **(form.model_extra or {})}}
    choices = ", ".join(RESPONSE_FORMATS)
    raise bad_request(f"response_format has no type {form.type[:64]!r}; choose one of: {choices}", "response_format")
