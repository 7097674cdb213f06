"""Calls of tools: the model reads which tools there are, calls one by JSON, and uses its answer.

Names of tools and parameters vary a great deal, so that they have to be copied from the list.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from training.storyteller.grammar import fact_tables, words
from training.storyteller.grammar.dice import Dice
from training.storyteller.grammar.messages import Conversation, Message
from training.storyteller.grammar.sums import draw_sum
from training.storyteller.grammar.text import typed

ToolSpec = dict[str, object]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One tool, a request that needs it, the call, what came back, and what is said then."""

    spec: ToolSpec
    request: str
    arguments: dict[str, object]
    result: object
    answer: str

    @property
    def name(self) -> str:
        function = self.spec["function"]
        assert isinstance(function, dict)
        return str(function["name"])


def tool_spec(
    dice: Dice,
    name: str,
    description: str,
    types: dict[str, str],
    optional: dict[str, object] | None = None,
) -> ToolSpec:
    """The description of a function as the chat interface of OpenAI has it."""
    properties: dict[str, object] = {}
    with_texts = dice.chance(0.4)
    for parameter, kind in types.items():
        properties[parameter] = {"type": kind} | (
            {"description": f"The {parameter.replace('_', ' ')}"} if with_texts else {}
        )
    properties |= optional or {}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _weather(dice: Dice) -> ToolUse:
    city = dice.pick(list(fact_tables.CAPITALS.values()))
    name = dice.pick(
        (
            "get_weather",
            "get_current_weather",
            "weather",
            "weather_lookup",
            "get_forecast",
            "current_weather",
        )
    )
    place = dice.pick(("city", "location", "place", "town"))
    unit: dict[str, object] = (
        {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}} if dice.chance(0.4) else {}
    )
    degrees, sky = (
        dice.number(-5, 35),
        dice.pick(("sunny", "cloudy", "rainy", "snowy", "windy", "foggy")),
    )
    arguments: dict[str, object] = {place: city}
    asked = dice.pick(
        (
            f"What is the weather in {city}?",
            f"How is the weather in {city}?",
            f"Is it raining in {city}?",
            f"What's the weather like in {city} today?",
            f"Tell me the weather in {city}.",
            f"How warm is it in {city}?",
            f"Do I need an umbrella in {city}?",
            f"weather in {city}",
        )
    )
    if unit and dice.chance(0.4):
        arguments["unit"] = wanted = dice.pick(("celsius", "fahrenheit"))
        asked = f"What is the weather in {city} in {wanted}?"
    description = dice.pick(
        (
            "Get the weather of a city",
            "Get the current weather",
            "Get the current weather in a given location",
            "Tells the weather",
        )
    )
    spec = tool_spec(dice, name, description, {place: "string"}, unit)
    return ToolUse(
        spec,
        asked,
        arguments,
        {"temperature": degrees, "sky": sky},
        f"In {city} it is {sky} and {degrees} degrees.",
    )


def _calculator(dice: Dice) -> ToolUse:
    top = dice.pick((20, 999, 999))
    left, right = dice.number(1, top), dice.number(1, top)
    name, said, wish, result = dice.pick(
        (
            ("add", f"{left} plus {right}", f"Add {left} and {right}", left + right),
            ("multiply", f"{left} times {right}", f"Multiply {left} by {right}", left * right),
            ("subtract", f"{left} minus {right}", f"Subtract {right} from {left}", left - right),
        )
    )
    first, second = dice.pick((("a", "b"), ("x", "y"), ("left", "right"), ("first", "second")))
    kind = dice.pick(("number", "integer"))
    spec = tool_spec(
        dice,
        dice.pick((name, f"{name}_numbers")),
        f"{name.capitalize()} two numbers",
        {first: kind, second: kind},
    )
    return ToolUse(
        spec,
        dice.pick(
            (f"What is {said}?", f"What is {said}?", wish, f"{wish}.", f"How much is {said}?")
        ),
        {first: left, second: right},
        {"result": result},
        f"The result is {result}.",
    )


def _calculate(dice: Dice) -> ToolUse:
    drawn = draw_sum(dice)
    parameter = dice.pick(("expression", "formula", "sum"))
    spec = tool_spec(
        dice,
        dice.pick(("calculate", "calculator", "compute", "evaluate")),
        "Work out an expression",
        {parameter: "string"},
    )
    return ToolUse(
        spec,
        f"Calculate {drawn} with the tool.",
        {parameter: str(drawn)},
        {"result": drawn.result},
        f"The result is {drawn.result}.",
    )


def _time(dice: Dice) -> ToolUse:
    city, hour, minute = (
        dice.pick(list(fact_tables.CAPITALS.values())),
        dice.number(0, 23),
        dice.number(10, 59),
    )
    place = dice.pick(("city", "location", "timezone", "place"))
    spec = tool_spec(
        dice,
        dice.pick(("get_time", "current_time", "clock", "get_current_time")),
        "Get the time in a city",
        {place: "string"},
    )
    asked = dice.pick(
        (
            f"What time is it in {city}?",
            f"How late is it in {city}?",
            f"Tell me the time in {city}.",
        )
    )
    return ToolUse(
        spec,
        asked,
        {place: city},
        {"time": f"{hour}:{minute}"},
        f"In {city} it is {hour}:{minute}.",
    )


def _timer(dice: Dice) -> ToolUse:
    minutes = dice.number(1, 60)
    parameter = dice.pick(("minutes", "duration", "length"))
    spec = tool_spec(
        dice,
        dice.pick(("set_timer", "start_timer", "timer")),
        "Start a timer",
        {parameter: "integer"},
    )
    asked = dice.pick(
        (
            f"Set a timer for {minutes} minutes.",
            f"Start a timer of {minutes} minutes.",
            f"Wake me in {minutes} minutes.",
        )
    )
    return ToolUse(
        spec,
        asked,
        {parameter: minutes},
        {"status": "ok"},
        f"The timer is set for {minutes} minutes.",
    )


def _message(dice: Dice) -> ToolUse:
    name, text = (
        dice.pick(words.BOYS + words.GIRLS),
        dice.pick(
            (
                "I am late",
                "dinner is ready",
                "happy birthday",
                "see you soon",
                "call me",
                "good night",
            )
        ),
    )
    to, body = dice.pick(
        (("to", "text"), ("receiver", "message"), ("name", "body"), ("recipient", "text"))
    )
    spec = tool_spec(
        dice,
        dice.pick(("send_message", "send_mail", "write_message", "text_someone")),
        "Send a message",
        {to: "string", body: "string"},
    )
    asked = dice.pick(
        (f'Send "{text}" to {name}.', f'Tell {name} "{text}".', f'Write to {name}: "{text}".')
    )
    return ToolUse(
        spec,
        asked,
        {to: name, body: text},
        {"status": "sent"},
        f"I have sent the message to {name}.",
    )


def _shopping(dice: Dice) -> ToolUse:
    thing, number = dice.pick(words.FRUITS + words.VEGETABLES), dice.number(1, 12)
    item, count = dice.pick(
        (("item", "count"), ("product", "quantity"), ("thing", "number"), ("name", "amount"))
    )
    spec = tool_spec(
        dice,
        dice.pick(("add_to_list", "order", "buy", "add_item", "shop")),
        "Put something on the shopping list",
        {item: "string", count: "integer"},
    )
    return ToolUse(
        spec,
        f"Put {number} {thing} on the shopping list.",
        {item: thing, count: number},
        {"status": "ok"},
        f"I have put {number} {thing} on the list.",
    )


def _search(dice: Dice) -> ToolUse:
    thing, place = (
        dice.pick(words.THINGS),
        dice.pick(("museum", "library", "shop", "archive", "house")),
    )
    parameter = dice.pick(("query", "text", "keyword", "q"))
    spec = tool_spec(
        dice,
        dice.pick(("search", "web_search", "find", "lookup", f"search_{place}")),
        "Search for something",
        {parameter: "string"},
    )
    number = dice.number(2, 40)
    asked = dice.pick(
        (f"Search for {thing}.", f"Look up {thing}.", f"Find {thing} in the {place}.")
    )
    return ToolUse(
        spec, asked, {parameter: thing}, {"hits": number}, f"I found {number} results for {thing}."
    )


def _any_name(dice: Dice) -> ToolUse:
    """A tool nobody has heard of, to be called by what its description says."""
    verb = dice.pick(
        (
            "open",
            "paint",
            "move",
            "wash",
            "feed",
            "repair",
            "start",
            "stop",
            "lock",
            "clean",
            "book",
            "light",
            "hide",
            "show",
        )
    )
    thing, value = dice.pick(words.THINGS), dice.pick(words.COLOURS + words.DAYS + words.BOYS)
    noun = thing.replace(" ", "_")
    parameter = dice.pick(("for", "mode", "value", "option", "target", "label"))
    spec = tool_spec(
        dice, f"{verb}_{noun}", f"{verb.capitalize()} the {thing}", {parameter: "string"}
    )
    asked = f"{verb.capitalize()} the {thing} with the {parameter} {value}."
    return ToolUse(spec, asked, {parameter: value}, {"done": True}, f"Done: {verb} the {thing}.")


USES: tuple[Callable[[Dice], ToolUse], ...] = (
    _weather,
    _weather,
    _weather,
    _calculator,
    _calculate,
    _time,
    _timer,
    _message,
    _shopping,
    _search,
    _any_name,
    _any_name,
    _any_name,
)


def draw_use(dice: Dice) -> ToolUse:
    return dice.pick(USES)(dice)


def draw_specs(dice: Dice, use: ToolUse) -> tuple[ToolSpec, ...]:
    """The tool that is needed, among up to two others of other names."""
    others: list[ToolSpec] = []
    for _ in range(dice.weighted({0: 5, 1: 3, 2: 1})):
        other = draw_use(dice)
        if (
            other.name.split("_")[-1] not in use.name
            and other.spec["function"] != use.spec["function"]
        ):
            others.append(other.spec)
    return tuple(dice.shuffled([use.spec, *others]))


def use_turns(use: ToolUse) -> tuple[Message, Message, Message]:
    """The call, what the tool answers, and what is said then."""
    call = {"name": use.name, "arguments": use.arguments}
    return (
        Message("assistant", "", f"I can use {use.name}.", (call,)),
        Message("tool", json.dumps(use.result)),
        Message("assistant", use.answer, "The tool has answered."),
    )


def _plain_result(dice: Dice, use: ToolUse) -> str:
    """What a tool answers in a sentence instead of JSON; the model says it again."""
    sky = dice.pick(("sunny", "cloudy", "rainy", "snowy", "windy", "foggy"))
    return dice.pick(
        (
            use.answer,
            dice.pick(("It is noon.", "It is midnight.", f"It is {dice.number(1, 12)} o'clock.")),
            dice.pick((f"It is {sky}.", f"It is {sky} and {dice.number(-5, 35)} degrees.")),
            dice.pick(
                ("Done.", "Sent.", "Nothing was found.", "It worked.", f"{sky.capitalize()}.")
            ),
            f"The {dice.pick(words.THINGS)} is {dice.pick(words.ADJECTIVES)}.",
            f"{dice.pick(words.BOYS + words.GIRLS)} has the {dice.pick(words.THINGS)}.",
        )
    )


def use_messages(dice: Dice, use: ToolUse) -> list[Message]:
    """The request and the call; the tool's answer mostly comes too."""
    turns = use_turns(use)
    if dice.chance(0.35):
        said = _plain_result(dice, use)
        turns = (turns[0], Message("tool", said), replace(turns[2], content=said))
    asked = Message("user", typed(dice, use.request))
    return [asked, *(turns if dice.chance(0.75) else turns[:1])]


def draw_conversation(dice: Dice, extra: Callable[[Dice], list[Message]]) -> Conversation:
    """Tools with a request for one of them; now and then a turn that needs none (`extra`)."""
    use = draw_use(dice)
    messages = use_messages(dice, use)
    if messages[-1].role == "assistant" and not messages[-1].tool_calls and dice.chance(0.35):
        messages += extra(dice)
    elif dice.chance(0.3):
        messages = extra(dice) + messages
    if dice.chance(0.08):
        messages = extra(dice)
    return Conversation(tuple(messages), tools=draw_specs(dice, use))
