"""openai-agents: agents over chats and over Responses, with a tool, whole and streamed."""

import asyncio

import pytest
import questions

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")


@pytest.mark.parametrize("form", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_agent_answers_streams_and_calls_its_tool(server, form):
    agents.set_tracing_disabled(True)
    cities = []

    @agents.function_tool
    def get_time(city: str) -> str:
        """Tell the time."""
        cities.append(city)
        return "It is noon."

    async def talk():
        async with openai.AsyncOpenAI(base_url=server.v1, api_key="none") as client:
            model = getattr(agents, form)(server.model, client)
            settings = agents.ModelSettings(temperature=0)
            agent = agents.Agent(name="a", model=model, tools=[get_time], model_settings=settings)
            whole = await agents.Runner.run(agent, questions.WHO)
            streamed = agents.Runner.run_streamed(agent, questions.WHO)
            async for _ in streamed.stream_events():
                pass
            await agents.Runner.run(agent, questions.TIME)
            return whole.final_output, streamed.final_output

    answers = asyncio.run(talk())

    assert [questions.NAME in answer for answer in answers] == [True, True]
    assert cities == ["Paris"]
