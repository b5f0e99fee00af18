"""A small application, to see a deployment work."""

from __future__ import annotations

from holdfast import Holdfast

app = Holdfast()


@app.task("greet")
async def greet(name: str) -> str:
    """Greet a customer."""
    return f"Hello, {name}!"
