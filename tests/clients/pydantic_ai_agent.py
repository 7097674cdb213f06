"""Ask two questions by an agent of pydantic-ai, and print the first answer and the calls of the tool as JSON."""

import json
import sys

from pydantic_ai import Agent


def make_model(form, url, name):
    """Return the model that speaks one of three APIs."""
    if form == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="none"))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    cls = OpenAIChatModel if form == "chat" else OpenAIResponsesModel
    return cls(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


form, url, model, who, time = sys.argv[1:]
cities = []
agent = Agent(make_model(form, url, model), model_settings={"temperature": 0})


@agent.tool_plain
def get_time(city: str) -> str:
    """Tell the time."""
    cities.append(city)
    return "It is noon."


answer = agent.run_sync(who).output
agent.run_sync(time)
sys.stdout.write(json.dumps([answer, cities]) + "\n")
