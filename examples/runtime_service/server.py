"""A service that greets: one endpoint, whose handler is an async generator."""

from dynamo.runtime import DistributedRuntime, dynamo_worker


async def greet(request):
    for word in ("Hello,", request["name"]):
        yield {"word": word}


@dynamo_worker()
async def main(runtime: DistributedRuntime):
    endpoint = runtime.namespace("example").component("greeter").endpoint("greet")
    await endpoint.serve_endpoint(greet)


if __name__ == "__main__":
    main()
