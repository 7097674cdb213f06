"""Publishers leave while all of them talk: libzmq aborts the process of a listener that takes no care."""

import asyncio
import os
import subprocess
import sys
import threading

import zmq

from dynamo.runtime.backends import zmq_receiver
from dynamo.runtime.events import Event
from waiting import PATIENT_S

NUM_LEAVES = 200


class Talkers:
    """Publishers that say all they can, from a thread."""

    def __init__(self, context: zmq.Context) -> None:
        self._sockets = [context.socket(zmq.PUB) for _ in range(3)]
        for socket in self._sockets:
            socket.set(zmq.LINGER, 0)
            socket.bind("tcp://127.0.0.1:0")
        self.addresses = [one.get_string(zmq.LAST_ENDPOINT) for one in self._sockets]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._talk)
        self._thread.start()

    def _talk(self) -> None:
        number = 0
        while not self._is_over.is_set():
            for socket in self._sockets:
                event = Event(topic="topic", publisher=1, number=number, payload=b"payload")
                socket.send(zmq_receiver.message_of(event))
            number += 1

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()
        for socket in self._sockets:
            socket.close()


async def listen() -> int:
    """How many events came while each publisher was left, and found again, many times."""
    heard, came = 0, asyncio.Event()

    def take(batch):
        nonlocal heard
        heard += len(batch)
        came.set()
        receiver.resume()

    with zmq.Context() as context:
        talkers = Talkers(context)
        receiver = zmq_receiver.EventReceiver(context, take, {})
        receiver.subscribe("topic")
        for address in talkers.addresses:
            receiver.connect(address)
        for number in range(NUM_LEAVES):
            came.clear()
            await came.wait()
            address = talkers.addresses[number % 3]
            receiver.disconnect(address)
            receiver.connect(address)
        await receiver.close()
        talkers.end()
    return heard


def test_publishers_that_leave_in_the_middle_of_talking_do_no_harm():
    done = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= NUM_LEAVES


if __name__ == "__main__":
    sys.stdout.write(str(asyncio.run(listen())))
