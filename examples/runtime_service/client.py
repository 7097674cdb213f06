"""A client of the greeter: it waits for an instance and prints the answer to each name."""

import sys

from dynamo.runtime import DistributedRuntime, dynamo_worker


@dynamo_worker()
async def main(runtime: DistributedRuntime):
    endpoint = runtime.namespace("example").component("greeter").endpoint("greet")
    client = await endpoint.client()
    await client.wait_for_instances()
    for name in sys.argv[1:] or ["world"]:
        async for item in await client.round_robin({"name": name}):
            print(item.data()["word"])


if __name__ == "__main__":
    main()
