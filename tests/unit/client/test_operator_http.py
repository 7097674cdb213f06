"""`dynamo.client` with answers that are cut off or are no HTTP."""

import http.client
import io
import urllib.error
import urllib.request

import pytest

from dynamo import client
from dynamo.base import errors


class CutBody(io.BytesIO):
    """A body that ends before its length."""

    def read(self, *_):
        raise http.client.IncompleteRead(b"{", 99)


def refuse(reason):
    def refuse(*_, **__):
        raise reason

    return refuse


@pytest.mark.parametrize(
    "open_url",
    [
        lambda *_, **__: CutBody(),
        refuse(urllib.error.HTTPError("http://worker", 500, "", None, CutBody())),
        refuse(http.client.BadStatusLine("no HTTP")),
    ],
    ids=["cut answer", "cut refusal", "another protocol"],
)
def test_answer_that_cannot_be_read_is_unavailable(monkeypatch, open_url):
    monkeypatch.setattr(urllib.request, "urlopen", open_url)
    worker = client.WorkerClient("http://worker")

    assert not worker.is_healthy()
    with pytest.raises(errors.Unavailable, match="http://worker does not answer"):
        worker.list_loras()
