"""Which way two ranks take, that both take the same one, and that it can be told."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm.errors import ObjcommError
from objcomm.transport import describe, link, local_connect, local_contact, local_socket, resolve, stores
from objcomm.transport.groups import store_of
from objcomm.transport.local_meeting import Meeting, Record, record_of_this_process, why_apart
from tests.process import sockets
from tests.ranks import run_ranks
from tests.same import assert_arrived

MIB = 1 << 20
_NEW_NETWORK = 0x40000000


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def replace(module: Any, name: str, function: Callable[..., Any]) -> None:
    """In a rank, which ends after its test."""
    setattr(module, name, function)


def both_ways(rank: int) -> None:
    mine, theirs = {"t": torch.full((MIB,), rank), "r": rank}, {"t": torch.full((MIB,), 1 - rank), "r": 1 - rank}
    work = objcomm.isend_object(mine, 1 - rank)
    assert_arrived(objcomm.recv_object(1 - rank), theirs)
    work.wait()
    assert_arrived(objcomm.exchange_objects(mine, 1 - rank), theirs)


def ways(prepare: Callable[[int], None], backend: str = "local", **kwargs: Any) -> list[str]:
    """What each of two ranks says of its way after both have talked; ``prepare`` runs first."""

    def ranks(rank: int) -> str:
        said: list[str] = []
        handler = logging.Handler(logging.DEBUG)
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("objcomm").addHandler(handler)
        logging.getLogger("objcomm").setLevel(logging.DEBUG)
        prepare(rank)
        both_ways(rank)
        how = describe(world(), 1 - rank)
        assert any(how in text for text in said), (how, said)
        return how

    told = run_ranks(ranks, backend=backend, **kwargs)
    assert len({how.split(":")[0].split(";")[0] for how in told}) == 1, told
    return told


@pytest.mark.parametrize("backend", ["local", "local strict"])
def test_two_ranks_of_one_host_go_around_the_network(backend: str) -> None:
    assert ways(lambda rank: None, backend) == ["within the host; large segments are read from the sender's memory"] * 2


@pytest.mark.parametrize("off", [[0], [1], [0, 1]])
def test_it_can_be_switched_off_at_either_end(off: list[int]) -> None:
    def prepare(rank: int) -> None:
        if rank in off:
            objcomm.configure(local_transport=False)

    for how in ways(prepare):
        assert how.startswith("over the process group: on rank ")
        assert "OBJCOMM_LOCAL_TRANSPORT" in how


def test_it_can_be_switched_off_in_the_environment() -> None:
    for how in ways(lambda rank: None, env={"OBJCOMM_LOCAL_TRANSPORT": "0"}):
        assert "OBJCOMM_LOCAL_TRANSPORT" in how


def test_different_network_namespaces() -> None:
    def prepare(rank: int) -> None:
        stores.second_line(world())()  # it must be open: no address can be reached from a new namespace
        # Where a process may not have one of its own, the answer of the system is replaced.
        if rank == 1 and ctypes.CDLL(None).unshare(_NEW_NETWORK) != 0:
            real = os.readlink
            replace(os, "readlink", lambda path: "net:[1]" if path == "/proc/self/ns/net" else real(path))

    for how in ways(prepare):
        assert how == "over the process group: rank 0 and rank 1 are in different network namespaces"


@pytest.mark.parametrize("nobody", [[1], [0]])
def test_a_network_namespace_that_does_not_show(nobody: list[int]) -> None:
    """The records agree, and still there is no way: the end that finds out tells the other."""

    def prepare(rank: int) -> None:
        real = local_connect.listen
        if rank in nobody:
            local_connect.listen = lambda token: real(token[::-1])
            real_connect = local_connect.connect
            local_connect.connect = lambda token: real_connect(token[::-1] + "x")

    if nobody == [0]:
        for how in ways(prepare):
            assert "over the process group: no connection within this host" in how
    else:
        for how in ways(prepare):
            assert "no connection within this host" in how and "refused" in how


def test_different_hosts() -> None:
    def prepare(rank: int) -> None:
        real = record_of_this_process

        def elsewhere(allowed: bool) -> Record:
            return Record(real(allowed).token, boot=f"boot-{rank}", network="net:[1]", user=0)

        replace(local_contact, "record_of_this_process", elsewhere)

    for how in ways(prepare):
        assert how == "over the process group: rank 0 and rank 1 are on different hosts"


def test_different_users() -> None:
    def prepare(rank: int) -> None:
        if rank == 1:
            user = os.geteuid()
            if user == 0:
                os.seteuid(65534)
            else:
                os.geteuid = lambda: user + 1

    for how in ways(prepare):
        assert "are of different users" in how


@pytest.mark.parametrize("suspicious", [0, 1])
def test_a_peer_that_claims_to_be_of_the_same_user(suspicious: int) -> None:
    """What counts is what the kernel says of the other end of the socket."""

    def prepare(rank: int) -> None:
        real = local_connect._credentials

        def another(sock: socket.socket) -> tuple[int, int, int]:
            pid, user, group = real(sock)
            return pid, user + 1, group

        if rank == suspicious:
            local_connect._credentials = another

    for how in ways(prepare):
        assert "over the process group: " in how and "process of user" in how


@pytest.mark.parametrize("blind", [[0], [0, 1]])
def test_different_pid_namespaces(blind: list[int]) -> None:
    """The pid of a process outside of the own namespace is 0: its memory is out of reach, its socket is not."""

    def prepare(rank: int) -> None:
        real = local_connect._credentials
        if rank in blind:
            local_connect._credentials = lambda sock: (0, *real(sock)[1:])

    told = ways(prepare)
    for rank in blind:
        assert "all bytes go over the socket" in told[rank].split(";")[2] and "pid namespace" in told[rank]
    for rank in (0, 1):
        assert ("over the socket" in told[rank].split(";")[1]) == (1 - rank in blind)


def test_a_pid_that_is_another_process_here() -> None:
    def prepare(rank: int) -> None:
        real = local_connect._credentials
        if rank == 0:
            local_connect._credentials = lambda sock: (os.getpid(), *real(sock)[1:])

    told = ways(prepare)
    assert "all bytes go over the socket" in told[0].split(";")[2]


def test_no_socket_can_be_had() -> None:
    def prepare(rank: int) -> None:
        def none(token: str) -> socket.socket:
            raise OSError("too many open files")

        local_connect.listen = none

    for how in ways(prepare):
        assert how.startswith("over the process group: on rank 0: no Unix socket can be had: too many open files")


@pytest.mark.parametrize("short_of", [0, 1])
def test_buffers_that_no_record_fits_into(short_of: int) -> None:
    def prepare(rank: int) -> None:
        if rank == short_of:
            local_socket.RECORD_BYTES = 1 << 30

    for how in ways(prepare):
        assert how.startswith("over the process group: no connection within this host: a socket has")


def test_another_system() -> None:
    def prepare(rank: int) -> None:
        def no_proc(path: str, **kwargs: Any) -> str:
            raise FileNotFoundError(path)

        if rank == 1:
            replace(os, "readlink", no_proc)

    for how in ways(prepare):
        assert "on rank 1: /proc does not tell" in how


def test_what_an_earlier_group_left_in_the_store_is_not_taken_for_the_peers() -> None:
    def prepare(rank: int) -> None:
        store = store_of(world())
        if rank == 0:
            old = record_of_this_process(True)
            for side, left in ((0, Record("ab" * 16, saw="cd" * 16)), (1, old)):
                text = json.dumps({**vars(left)})
                store.set(f"objcomm/local/0-1/{side}", text)
            dist.barrier()
            time.sleep(0.3)
        else:
            dist.barrier()

    for how in ways(prepare):
        assert how.startswith("within the host")


def test_a_stranger_that_connects_first_is_not_the_peer() -> None:
    def prepare(rank: int) -> None:
        if rank == 1:
            token = ""
            end = time.monotonic() + 10
            while not token and time.monotonic() < end:
                store = store_of(world())
                if store.check(["objcomm/local/0-1/0"]):
                    token = json.loads(store.get("objcomm/local/0-1/0"))["token"]
                time.sleep(0.01)
            strangers = local_connect.connect(token) + local_connect.connect(token)
            strangers[0].send(b"hello")
            strangers[1].send(bytes(local_connect._HELLO.size))
            for one in strangers[:3]:
                one.close()
            threading.Timer(1, strangers[3].close).start()

    for how in ways(prepare):
        assert how.startswith("within the host")


@pytest.mark.parametrize("rubbish", ["", "[]", "{}", '{"token": 5}', '{"token": "a", "user": "root"}', "x" * 5000])
def test_rubbish_in_the_store_is_an_error_on_both_ends(rubbish: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            store_of(world()).set("objcomm/local/0-1/1", rubbish)
            began = time.monotonic()
            with pytest.raises(objcomm.PeerError, match="contact with rank 1 could not be made"):
                objcomm.send_object(1, 1)
            dist.barrier()
        else:
            dist.barrier()
            began = time.monotonic()
            with pytest.raises(objcomm.PeerError):
                objcomm.recv_object(0)
        assert time.monotonic() - began < 5

    run_ranks(ranks, backend="local")


def test_a_peer_that_comes_after_the_time_out_is_told_at_once() -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            with pytest.raises(objcomm.TransferTimeout, match=r"rank 1 did not come within 0\.3 s"):
                objcomm.recv_object(1, timeout=0.3)
            dist.barrier()
            with pytest.raises(objcomm.PeerError, match="closed since TransferTimeout"):
                objcomm.recv_object(1)
        else:
            dist.barrier()
            began = time.monotonic()
            with pytest.raises(objcomm.PeerError, match="rank 0 has closed the connection"):
                objcomm.send_object("late", 0)
            assert time.monotonic() - began < 5

    run_ranks(ranks, backend="local")


def _threads() -> int:
    """Threads of transfers: the one that reports on SIGUSR1 lives as long as the process."""
    return sum(thread.name != "objcomm-diagnosis" for thread in threading.enumerate())


def test_nothing_is_left_behind() -> None:
    def ranks(rank: int) -> None:
        def named(token: str) -> int:
            return sum(f"@objcomm-{token}" in line for line in Path("/proc/net/unix").read_text().splitlines())

        threads = _threads()
        for attempt in range(3):
            group = dist.new_group([0, 1])
            before = len(sockets())
            ahead = objcomm.irecv_object(1 - rank, group=group)
            objcomm.send_object({"t": torch.ones(MIB), "attempt": attempt}, 1 - rank, group=group)
            assert ahead.wait()["attempt"] == attempt
            assert len(sockets()) >= before + 2
            there: Any = link(group, 1 - rank)
            token = there._local._contact._meeting.mine.token
            assert named(token) == (0 if rank else 2)  # the one that listened is gone
            dist.destroy_process_group(group)
            del group, ahead, there
            end = time.monotonic() + 10
            while (len(sockets()) > before or _threads() > threads) and time.monotonic() < end:
                gc.collect()
                time.sleep(0.02)
            assert len(sockets()) <= before and _threads() <= threads, threading.enumerate()
            assert not named(token)
            dist.barrier()

    run_ranks(ranks, backend="local")


def test_the_rule_is_the_same_for_both_ends() -> None:
    here = Record("a", boot="b", network="n", user=5)
    assert why_apart(here, Record("c", boot="b", network="n", user=5), 0, 1) == ""
    for other, word in (
        (Record("c", why_not="of a reason"), "on rank 1: of a reason"),
        (Record("c", boot="x", network="n", user=5), "different hosts"),
        (Record("c", boot="b", network="m", user=5), "network namespaces"),
        (Record("c", boot="b", network="n", user=6), "different users, 5 and 6"),
        (Record("c", boot="b", network="n", user=5, version=2), "different versions"),
    ):
        assert word in why_apart(here, other, 0, 1)
        assert why_apart(other, here, 1, 0)


def test_a_record_counts_once_it_names_the_reader() -> None:
    store = dist.HashStore()
    low = Meeting(lambda: store, "m", 0, Record("aa"))
    high = Meeting(lambda: store, "m", 1, Record("bb"))
    assert low.meet() is None
    high.publish()
    assert low.meet() is None  # it may be of an earlier group
    met = high.meet()
    assert met is not None and (met.token, met.saw) == ("aa", "bb")
    met = low.meet()
    assert met is not None and (met.token, met.saw) == ("bb", "aa")
    low.forget()
    high.forget()
    assert low.look() is None and high.look() is None


def test_describing_a_link_decides_nothing() -> None:
    def ranks(rank: int) -> None:
        assert "not decided: rank" in describe(world(), 1 - rank)
        time.sleep(0.2)
        assert "not decided: rank" in describe(world(), 1 - rank)
        both_ways(rank)
        there = link(*resolve(None, 1 - rank, None)[::2])
        there.close()
        assert "closed: this rank broke off" in describe(world(), 1 - rank)
        assert issubclass(objcomm.PeerError, ObjcommError)

    run_ranks(ranks, backend="local")
