"""The route that takes documents: as text, as messages, as files."""

from __future__ import annotations

import json
import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response

from precis.errors import InvalidRequest, PrecisError
from precis.wire.records import ContextRecord, Source
from service.access import CallerDep, needs
from service.contexts import AT_ONCE, created, removed, waited
from service.files import extract
from service.parts import prepare_all
from service.schemas import ContextIn, validated
from service.state import StateDep

router = APIRouter(prefix="/v1/contexts", tags=["contexts"])
_WRITES = [Depends(needs("write"))]
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/ContextIn"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "PDF, DOCX, HTML, Markdown or text",
                        },
                        "options": {"type": "string", "description": "the other fields of the JSON form, as JSON"},
                    },
                }
            },
        },
    }
}
_WAIT_LIMIT_S = 3600.0


@router.post("", openapi_extra=_BODY, status_code=202, responses=AT_ONCE, dependencies=_WRITES)
async def create_context(
    request: Request,
    state: StateDep,
    caller: CallerDep,
    wait: Annotated[float | None, Query(ge=0, le=_WAIT_LIMIT_S, description="seconds to wait for ready")] = None,
) -> Response:
    """Upload a document; 202 while it is being compressed, 200 when it is there already or got ready within `wait`."""
    wanted, source = await _read(request)
    made = await prepare_all(state, wanted, caller.tenant, source)
    await state.fleet.need_worker(made[0][0].model, job="compress")
    await state.records.check_room(sum(record.reserved_bytes for record, _ in made))
    n_made, deadline = list[ContextRecord](), None if wait is None else time.monotonic() + wait
    try:
        for record, token_ids in made[1:]:
            await created(state, request, record, token_ids, None)
            n_made.append(record)
        head, token_ids = made[0]
        body, status, headers = await created(state, request, head, token_ids, wait)
    except PrecisError:  # a document is there as a whole or not at all
        for record in n_made:
            if (kept := await state.records.find(record.id)) is not None:
                await removed(state, kept)
        raise
    for record in n_made if deadline is not None else []:
        if (part := await state.records.find(record.id)) is not None:
            await waited(state, part, max(0.0, (deadline or 0.0) - time.monotonic()))
    return JSONResponse(body, status, headers=headers)


async def _read(request: Request) -> tuple[ContextIn, Source | None]:
    """The upload from JSON or from a multipart form, and what the file was."""
    try:
        if request.headers.get("content-type", "").startswith("multipart/form-data"):
            async with request.form(max_files=1, max_fields=8) as form:
                upload = form.get("file")
                if upload is None or isinstance(upload, str):
                    raise InvalidRequest("the form needs a part named file")
                options = json.loads(str(form.get("options") or "{}"))
                if not isinstance(options, dict):
                    raise InvalidRequest("options must be a JSON object")
                data, name = await upload.read(), upload.filename or ""
            found = await extract(data, name)
            wanted = validated(ContextIn, {"name": name, **options, "text": found.text})
            return wanted, Source(found.kind, len(data), found.page_starts)
        return validated(ContextIn, await request.json()), None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg} at character {error.pos}") from error
