"""Three services in a row, each a process of its own: the text passes through all and comes back word by word."""

import msgspec

from dynamo.sdk import api, async_on_start, depends, dynamo_context, endpoint, service


class Words(msgspec.Struct):
    """What the services send each other; a dataclass or a model of pydantic's would do as well."""

    text: str


@service(dynamo={"namespace": "inference"}, workers=2)
class Backend:
    """The end of the row; `message` comes from the configuration."""

    def __init__(self, message: str = "back"):
        self.message = message

    @async_on_start
    async def announce(self):
        names = [served.name.endpoint for served in dynamo_context["endpoints"]]
        print(f"Backend serves {names}", flush=True)

    @endpoint()
    async def generate(self, request: Words):
        for word in f"{request.text}-{self.message}".split(","):
            yield f"Backend: {word}"


@service(dynamo={"namespace": "inference"})
class Middle:
    """Passes on what it gets."""

    backend = depends(Backend)

    @endpoint()
    async def generate(self, request: Words):
        async for word in self.backend.generate(Words(text=f"{request.text}-mid")):
            yield f"Middle: {word}"


@service(dynamo={"namespace": "inference"})
class Frontend:
    """The HTTP side: `curl -d '{"text": "test,again"}' localhost:8000/generate`."""

    middle = depends(Middle)

    @api
    async def generate(self, text: str):
        async for word in self.middle.generate(Words(text=text)):
            yield f"Frontend: {word}\n"
