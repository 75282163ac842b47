"""The names under which the messages of a call among several ranks travel: ``<call> channel``.

Ranks that make different calls notice by them. What a program is told has the call and its own channel apart.
"""

from __future__ import annotations

_OPEN, _CLOSE = "<", "> "


def label(call: str, channel: str) -> str:
    """The channel of the messages of ``call``; ``channel`` is the one that the program gave.

    >>> label("all_gather", "metrics")
    '<all_gather> metrics'
    """
    return f"{_OPEN}{call}{_CLOSE}{channel}"


def plain(channel: str) -> str:
    """The program's own channel in the name of a call.

    >>> plain("<all_gather> metrics")
    'metrics'
    """
    return channel.partition(_CLOSE)[2]


def where(channel: str) -> str:
    """What to say of a channel, the program's own or one of a call, behind what is about it.

    >>> where("metrics"), where("<all_gather> metrics"), where("<all_gather> "), where("")
    (" on channel 'metrics'", " of all_gather on channel 'metrics'", ' of all_gather', '')
    """
    if channel.startswith(_OPEN) and _CLOSE in channel:
        call = channel[len(_OPEN) :].partition(_CLOSE)[0]
        return f" of {call}{where(plain(channel))}"
    return f" on channel {channel!r}" if channel else ""
