"""`/ui`: a chat page that shows how tokens come about. Two files of this package; nothing from elsewhere."""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse

_FOLDER = Path(__file__).resolve().parent / "ui"
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'self'",
}


def add_ui(api: FastAPI) -> None:
    """The page's routes."""

    @api.get("/ui", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_FOLDER / "index.html", headers=_HEADERS)

    @api.get("/ui/app.js", include_in_schema=False)
    async def script() -> FileResponse:
        return FileResponse(_FOLDER / "app.js", headers=_HEADERS, media_type="text/javascript")
