"""Bytes between two ends of a real connection: all of them arrive, however they come."""

import array
import fcntl
import itertools
import socket
import struct
import termios
import threading

import pytest

from dynamo.base import errors
from dynamo.transfer import link as links
from dynamo.transfer import link_pool, messages
from dynamo.transfer.api import TimeLimit
from dynamo.transfer.link import Link

WAKE = 256 * 1024


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    yield Link(near), far
    near.close()
    far.close()


def spans_of(total):
    """In unequal parts with gaps between them, the later ones first."""
    ends = sorted({0, total, total // 3, total // 2 + 1} & set(range(total + 1)))
    spans = [
        (start + 7 * i, end - start) for i, (start, end) in enumerate(itertools.pairwise(ends))
    ]
    return spans[::-1]


@pytest.mark.parametrize("total", [1, WAKE - 1, WAKE, WAKE + 1, 2 * WAKE + 3, 20 * WAKE])
@pytest.mark.parametrize("is_summed", [False, True])
def test_spans_arrive_whole_and_messages_after_them(ends, total, is_summed):
    link, far = ends
    sent = memoryview(bytearray(range(251)) * (total // 251 + 2))
    received = memoryview(bytearray(len(sent)))
    spans, limit = spans_of(total), TimeLimit(30)

    def send():
        Link(far).send_spans(sent, spans, limit, is_summed=is_summed)
        far.sendall(b"!")

    sending = threading.Thread(target=send)
    sending.start()
    link.receive_spans(received, spans, limit, is_summed=is_summed)

    assert link.receive_bytes(1, limit) == b"!"
    sending.join()
    for at, length in spans:
        assert received[at : at + length] == sent[at : at + length]


@pytest.mark.parametrize("num_first", [1, WAKE - 1, WAKE + 1, 2 * WAKE - 1, 2 * WAKE + 1])
def test_receiver_waits_for_a_slow_sender_at_any_point(ends, num_first):
    """The rest is sent when the kernel has acknowledged the first, so that both come for themselves."""
    link, far = ends
    body = bytes(range(256)) * (3 * WAKE // 256)
    received = memoryview(bytearray(len(body)))
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send():
        far.sendall(body[:num_first])
        await_acknowledgement(far)
        for byte in range(num_first, num_first + 3):
            far.sendall(body[byte : byte + 1])
            await_acknowledgement(far)
        far.sendall(body[num_first + 3 :])

    sending = threading.Thread(target=send)
    sending.start()
    link.receive_spans(received, [(0, len(body))], TimeLimit(30), is_summed=False)

    sending.join()
    assert received == body


@pytest.mark.parametrize("num_sent", [1, WAKE + 1, 3 * WAKE - 1])
def test_sender_that_closes_early_is_an_error_at_once(ends, num_sent):
    link, far = ends
    far.sendall(bytes(num_sent))
    far.shutdown(socket.SHUT_WR)
    received = memoryview(bytearray(3 * WAKE))

    with pytest.raises(errors.TransferError, match="closed the connection"):
        link.receive_spans(received, [(0, 3 * WAKE)], TimeLimit(30), is_summed=False)


def test_sender_that_stalls_is_an_error_at_the_time_limit(ends):
    link, far = ends
    far.sendall(bytes(WAKE + 1))
    received = memoryview(bytearray(3 * WAKE))

    with pytest.raises(errors.TransferError, match="not complete within"):
        link.receive_spans(received, [(0, 3 * WAKE)], TimeLimit(0.2), is_summed=False)


@pytest.mark.parametrize("num_sent", [0, WAKE + 1])
def test_copy_without_any_byte_for_a_while_is_given_up_before_the_time_limit(
    ends, monkeypatch, num_sent
):
    link, far = ends
    monkeypatch.setattr(links, "STALL_S", 0.1)
    far.sendall(bytes(num_sent))
    received = memoryview(bytearray(3 * WAKE))

    with pytest.raises(errors.TransferError, match=r"no byte of the copy has come for 0\.1 s"):
        link.receive_spans(received, [(0, 3 * WAKE)], TimeLimit(30), is_summed=False)


def await_acknowledgement(sock):
    """SIOCOUTQ counts what the other side's kernel has not acknowledged."""
    left = array.array("i", [1])
    while left[0]:
        fcntl.ioctl(sock, termios.TIOCOUTQ, left)


@pytest.mark.parametrize(("wanted", "sent"), [(-1, 0), (0, 0), (16_384, 16_384), (10**9, 16_384)])
def test_welcome_is_padded_beyond_a_packet_for_a_client_that_asks(ends, wanted, sent):
    link, far = ends
    limit = TimeLimit(30)
    link.send(messages.AgentHello("client", "epoch", wanted), limit)

    assert links.welcome(Link(far), epoch="epoch", limit=limit) == "client"
    assert len(link.receive(messages.AgentWelcome, limit=limit, max_bytes=20_000).padding) == sent


class Trickle:
    """A socket that brings ten bytes within its first wait, and then none; it waits in no time."""

    def __init__(self):
        self.waited_s, self._timeout_s, self._num_left = 0.0, 0.0, 10

    def setsockopt(self, level, option, value):
        seconds, microseconds = struct.unpack("ll", value)
        self._timeout_s = seconds + microseconds / 1e6

    def recvmsg_into(self, buffers, size, flags):
        self.waited_s += self._timeout_s  # also for a part of what was asked for
        if not self._num_left:
            raise BlockingIOError
        num, self._num_left = self._num_left, 0
        return (num,)


def test_copy_that_stops_in_the_middle_is_given_up_after_one_limit(ends):
    link, _ = ends
    sock, link._sock = link._sock, Trickle()
    with pytest.raises(errors.TransferError, match="no byte of the copy has come for 2 s"):
        link.receive_spans(memoryview(bytearray(64)), [(0, 64)], TimeLimit(60), is_summed=False)
    waited_s, link._sock = link._sock.waited_s, sock

    assert 2.0 <= waited_s < 2.5


def test_link_stays_in_the_pool_if_a_late_thread_has_no_time_left_for_it(ends):
    link, _ = ends
    pool = link_pool.LinkPool(lambda limit: link, lambda link, limit: None)
    pool.warm(TimeLimit(30))
    cancelled = TimeLimit(30)
    cancelled.cancel()
    with pytest.raises(errors.TransferError, match="cancelled"), pool.borrow(cancelled):
        pass
    pool.close()

    with pytest.raises(errors.TransferError):
        link.send_bytes(b"x", TimeLimit(30))
