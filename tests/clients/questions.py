"""What the clients ask: questions that the built-in model knows, and a tool that it calls."""

WHO = "Who are you?"
NAME = "Storyteller"  # in the answer
TIME = "What time is it in Paris?"
PERSON = "Ann is 12 years old."
SAY = [{"role": "user", "content": WHO}]
ASK_TIME = [{"role": "user", "content": TIME}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "the city"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_time", "description": "Tell the time.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
