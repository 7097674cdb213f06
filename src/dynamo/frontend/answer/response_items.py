"""The output items of a response: a message for what was said, `reasoning` for what was thought, `function_call`.

An item with text has one part; a function call has none.
"""

from typing import Any

from dynamo.frontend.answer import choices


def new(piece: choices.Piece, number: int, digits: str) -> dict[str, Any]:
    """The item that a piece of this kind begins, before it has any text."""
    if isinstance(piece, choices.Call):
        return {
            "type": "function_call",
            "id": f"fc_{digits}{number:02x}",
            "call_id": piece.id,
            "name": piece.name,
            "arguments": "",
            "status": "in_progress",
        }
    growing = {"status": "in_progress", "content": []}
    if isinstance(piece, str):
        item_id = f"msg_{digits}{number:02x}"
        return {"type": "message", "id": item_id, "role": "assistant", **growing}
    return {"type": "reasoning", "id": f"rs_{digits}{number:02x}", "summary": [], **growing}


def complete(item: dict[str, Any], text: str, status: str) -> dict[str, Any]:
    """The item with its text."""
    if item["type"] == "function_call":
        return {**item, "arguments": text, "status": status}
    return {**item, "status": status, "content": [part(item, text)]}


def part(item: dict[str, Any], text: str) -> dict[str, Any]:
    """What the text is in."""
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def text_of(piece: choices.Piece) -> str:
    """What it says."""
    if isinstance(piece, str):
        return piece
    return piece.arguments if isinstance(piece, choices.Call) else piece.text
