"""What discovery over etcd keeps to itself; `tests/contract` has it with a real etcd."""

from dynamo.base import clock, errors
from dynamo.runtime.backends.etcd import access, discovery


class RefusingEtcd:
    """An etcd that takes nothing from this user any more."""

    async def put(self, key, value, lease_id, *, after):
        raise errors.ConfigError("etcd refuses: PERMISSION_DENIED")

    delete = put


def new_member():
    return discovery.EtcdDiscovery(
        access.EtcdAccess(addresses=("etcd:2379",)),
        1,
        lease_ttl_s=10,
        is_alive=lambda _key, _value: False,
        time=clock.SystemClock(),
    )


async def test_key_that_etcd_does_not_let_us_remove_is_no_error_of_its_owner(caplog):
    caplog.set_level("INFO")
    member = new_member()
    member._lease.set_key("k", b"1")
    member._etcd = RefusingEtcd()
    member._is_answering.set()
    await member.delete("k")

    assert "PERMISSION_DENIED" in caplog.text


async def test_refusal_of_an_etcd_that_came_back_is_said_once(caplog):
    """Such as after a change of its passwords; of two servers the other may still be away."""
    member = new_member()
    member._started.set_result(None)
    away = errors.Unavailable("etcd at a:2379: refused")
    refusal = errors.ConfigError("etcd at b:2379 refuses: authentication failed")
    for error in (away, refusal, away, refusal):
        member._report_outage(error, 1.0)

    assert ["authentication" in record.getMessage() for record in caplog.records] == [False, True]
