"""Egress policy of a pod: rules, decisions, the sockets they need, and strict parsers for what arrives on those.

A pod has a network namespace with only `lo`. It opens the sockets of `EgressPolicy.listen_specs` there and hands them
to the host process, so allowed connections arrive in the egress proxy (`proxy.py`) and everything else has no route:
nothing can fail open. This module does no I/O and reads no clock. The parsers (TLS, DNS; `http.py` has those of HTTP)
take untrusted bytes: each runs in linear time and raises only `ProtocolError`, whose text never repeats what was sent.
"""

import ipaddress
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

from etude.errors import EtudeError, InputError
from etude.pods.pod import Egress

PROXY_ADDRESS, PROXY_PORT = "127.0.0.1", 3128
DNS_ADDRESS, DNS_PORT = "127.0.0.1", 53
FAKE_NETWORK = ipaddress.ip_network("198.18.0.0/15")  # reserved for benchmarks (RFC 2544): no real host uses it
WILDCARD_ADDRESS = "198.18.0.1"
FIRST_EXACT = int(ipaddress.ip_address("198.18.1.0"))  # the N-th exact host, from 1, gets this + N
MAX_RULES = 1000

MAX_HELLO = 16 << 10  # a browser's ClientHello with post-quantum keys is about 2 KiB
MAX_LINE = 8 << 10  # bytes of an unfinished first line before the protocol is decided without its end


class ProtocolError(EtudeError):
    """The bytes received on a connection violate its protocol."""


# -- rules


@dataclass(frozen=True, slots=True)
class EgressRule:
    """One allowed destination. A wildcard allows every name below `host`, not `host` itself."""

    host: str  # normalized by `normalize_host`
    wildcard: bool
    port: int

    def __str__(self) -> str:
        return ("*." if self.wildcard else "") + authority(self.host, self.port)

    @property
    def literal(self) -> bool:
        """Whether the host is an IP address."""
        return not self.wildcard and is_address(self.host)

    def covers(self, host: str) -> bool:
        return host.endswith("." + self.host) if self.wildcard else host == self.host


def parse_rule(text: str) -> EgressRule:
    """Parse `host`, `host:port`, `*.host:port`, `1.2.3.4:port` or `[2001:db8::1]:port`; the default port is 443."""

    def bad(reason: str) -> InputError:
        return InputError(f"egress rule {text!r}: {reason}")

    rule = text.strip()
    if "://" in rule:
        raise bad("this is a URL; expected host:port, such as example.org:443")
    if "/" in rule:
        raise bad("expected host:port; networks and paths cannot be allowed, only single hosts and *.names")
    wildcard = rule.startswith("*.")
    rest = rule[2:] if wildcard else rule
    if "@" in rest:
        raise bad("a rule has no user; expected host:port")
    if "*" in rest.partition(":")[0]:
        raise bad("a * is allowed only at the front, as in *.example.org:443")
    try:
        host, port = split_authority(rest, 443)
    except InputError as error:
        raise bad(str(error)) from None
    if is_address(host):
        if wildcard:
            raise bad("an address has no names below it; leave out the *.")
        address = ipaddress.ip_address(host)
        if address.is_unspecified or address.is_multicast:
            raise bad("no host can be reached at this address; expected a unicast address")
    elif host == "localhost" or host.endswith(".localhost"):
        raise bad(f"localhost is the pod itself; 127.0.0.1:{port} is the machine that runs the pods")
    return EgressRule(host, wildcard, port)


def split_authority(text: str, default_port: int | None) -> tuple[str, int]:
    """Return the normalized host and the port of `host:port`; without a default port, the port is required."""
    if text.startswith("["):
        inside, bracket, tail = text[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")) or ":" not in inside:
            raise InputError("expected an IPv6 address in brackets, such as [2001:db8::1]:443")
        host, port = inside, tail[1:] if tail else None
    else:
        host, colon, after = text.partition(":")
        if ":" in after:
            raise InputError("an IPv6 address must be in brackets, such as [2001:db8::1]:443")
        port = after if colon else None
    if port is None and default_port is None:
        raise InputError("the port is missing; expected host:port")
    if port is not None and not (re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise InputError("the port must be one number from 1 to 65535 (no ranges: write one rule per port)")
    return normalize_host(host), default_port if port is None else int(port)  # type: ignore[return-value]


def normalize_host(text: str) -> str:
    """Return the normal form in which hosts are compared: lower-case ASCII (IDNA), or the shortest address."""
    if len(text) > 255:
        raise InputError("the host name is longer than 253 characters")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        pass
    else:
        if "%" in text:
            raise InputError("an address with a zone (%) is valid only on its own machine")
        mapped = getattr(address, "ipv4_mapped", None)
        return str(mapped or address)
    try:
        host = text.removesuffix(".").encode("ascii" if text.isascii() else "idna").decode("ascii").lower()
    except UnicodeError:
        raise InputError("the host name is not a valid internationalized name") from None
    labels = host.split(".")
    if len(host) > 253 or not all(re.fullmatch(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", label) for label in labels):
        raise InputError("expected a host name such as example.org, or an IP address")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):  # some resolvers read 127.1 and 0x7f000001 as addresses
        raise InputError("this is neither a name nor an address in the usual form, such as 192.0.2.7")
    return host


def is_address(host: str) -> bool:
    """Whether a normalized host is an address rather than a name."""
    return ":" in host or host.rpartition(".")[2].isdigit()


def authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def forbidden_address(text: str, private_ok: bool = False) -> str:
    """Return why an address that a name resolved to must not be connected to; empty when it is allowed.

    The owner of a name decides where it points: without this check, `rebind.example.org` could be the cloud's metadata
    service or a database on the operator's own network. An IPv6 address that embeds an IPv4 address is judged by that.
    """
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return "not an address"
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in ipaddress.ip_network("64:ff9b::/96"):  # NAT64
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return forbidden_address(str(inner), private_ok)
    kinds = ("unspecified", "loopback", "link_local", "multicast", "private", "reserved")
    for name in kinds[:4] if private_ok else kinds:
        if getattr(address, f"is_{name}"):
            return f"{'an' if name == 'unspecified' else 'a'} {name.replace('_', '-')} address"
    if str(address) == "168.63.129.16":  # in the public range, but one cloud's hypervisor answers it
        return "a cloud's own service address"
    return "" if address.is_global or private_ok else "not a public address"


# -- policy


@dataclass(frozen=True, slots=True)
class EgressDecision:
    """Whether a connection is allowed, with the rule that allows it or the reason for the refusal."""

    allowed: bool
    rule: EgressRule | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ListenSpec:
    """A socket to open inside the pod: listening for tcp, bound for udp."""

    kind: Literal["tcp", "udp"]
    address: str
    port: int
    role: Literal["proxy", "dns", "carry"]
    host: str = ""  # for "carry": the host that this address stands for; empty if the client's bytes must name it


@dataclass(frozen=True)
class EgressPolicy:
    """The egress rules of one pod and what follows from them. Without rules it opens no socket and allows nothing."""

    rules: tuple[EgressRule, ...] = ()
    transparent: bool = False
    private_ok: bool = False  # names may resolve to private networks, but never to this machine

    @classmethod
    def from_egress(cls, egress: Egress) -> Self:
        policy = cls(tuple(dict.fromkeys(map(parse_rule, egress.allow))), egress.transparent, egress.private)
        policy._check()
        return policy

    def _check(self) -> None:
        if len(self.rules) > MAX_RULES:
            raise InputError(f"egress: {len(self.rules)} rules, at most {MAX_RULES} are allowed; use *.names")
        taken: set[tuple[str, str, int]] = set()
        for listen in self.listen_specs():
            endpoint = (listen.kind, listen.address, listen.port)
            if endpoint in taken:
                at = authority(listen.address, listen.port)
                raise InputError(
                    f"egress: {at} is used by the pod's own proxy or name server and cannot be allowed; "
                    "use another port"
                )
            taken.add(endpoint)
        for rule in self.rules if self.transparent else ():
            if rule.literal and ":" not in rule.host and ipaddress.IPv4Address(rule.host) in FAKE_NETWORK:
                raise InputError(
                    f"egress rule {str(rule)!r}: transparent egress reserves {FAKE_NETWORK}; use another address"
                )

    def decide(self, host: str, port: int) -> EgressDecision:
        """Decide about one connection; never raises. Exact rules come first, then wildcards from long to short."""
        try:
            host = normalize_host(host)
        except InputError:
            return EgressDecision(False, None, "this is not a host name")
        found = [rule for rule in self.rules if rule.port == port and rule.covers(host)]
        if found:
            return EgressDecision(True, min(found, key=lambda rule: (rule.wildcard, -len(rule.host))))
        others = sorted({rule.port for rule in self.rules if rule.covers(host)})
        but = f" (only port {', '.join(map(str, others))})" if others else ""
        return EgressDecision(False, None, f"no rule allows it{but}")

    @cached_property
    def fake_addresses(self) -> dict[str, str]:
        """Map each exact name of the rules to the fake address that stands for it in a transparent pod."""
        hosts = dict.fromkeys(rule.host for rule in self.rules if not rule.wildcard and not rule.literal)
        return {host: str(ipaddress.IPv4Address(FIRST_EXACT + n)) for n, host in enumerate(hosts, 1)}

    def lookup(self, name: str) -> str | None:
        """Return the address that a transparent pod's name server gives for a name; None if no rule allows it."""
        if name in self.fake_addresses:
            return self.fake_addresses[name]
        return WILDCARD_ADDRESS if any(rule.wildcard and rule.covers(name) for rule in self.rules) else None

    def listen_specs(self) -> list[ListenSpec]:
        """Return the sockets to open in the pod, in a fixed order.

        Programs never send loopback addresses to a proxy (NO_PROXY), so a rule for one, which means the same port of
        the machine that runs the pods, gets a "carry" socket in both modes. A name with an exact rule gets its own
        address, which also listens on the ports of every wildcard that covers the name.
        """
        if not self.rules:
            return []
        literals = [rule for rule in self.rules if rule.literal]
        if not self.transparent:
            carried = [rule for rule in literals if ipaddress.ip_address(rule.host).is_loopback]
            proxy = ListenSpec("tcp", PROXY_ADDRESS, PROXY_PORT, "proxy")
            return [proxy, *(ListenSpec("tcp", rule.host, rule.port, "carry", rule.host) for rule in carried)]
        listen_specs = [ListenSpec(kind, DNS_ADDRESS, DNS_PORT, "dns") for kind in ("udp", "tcp")]
        listen_specs += [ListenSpec("tcp", rule.host, rule.port, "carry", rule.host) for rule in literals]
        wildcards = [rule for rule in self.rules if rule.wildcard]
        exact: dict[str, list[int]] = {}
        for rule in self.rules:
            if not rule.wildcard:
                exact.setdefault(rule.host, []).append(rule.port)
        for host, address in self.fake_addresses.items():
            ports = sorted({rule.port for rule in wildcards if rule.covers(host)}.union(exact[host]))
            listen_specs += [ListenSpec("tcp", address, port, "carry", host) for port in ports]
        ports = sorted({rule.port for rule in wildcards})
        return listen_specs + [ListenSpec("tcp", WILDCARD_ADDRESS, port, "carry") for port in ports]

    def addresses(self) -> list[str]:
        """Return the addresses to add to the pod's `lo`, without those it always has."""
        wanted = dict.fromkeys(listen.address for listen in self.listen_specs())
        return [address for address in wanted if not ipaddress.ip_address(address).is_loopback]

    def environment(self) -> dict[str, str]:
        """Return variables for the pod's commands, in upper and lower case because programs read one or the other."""
        if self.transparent or not self.rules:
            return {}
        proxy, direct = f"http://{PROXY_ADDRESS}:{PROXY_PORT}", "localhost,127.0.0.1,::1"
        # No ALL_PROXY: only http and https are forwarded, and some programs take it for a SOCKS server.
        upper = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "NO_PROXY": direct}
        return upper | {name.lower(): value for name, value in upper.items()}

    def resolv_conf(self) -> str:
        """Return the pod's /etc/resolv.conf; empty when names are not resolved inside the pod."""
        return f"nameserver {DNS_ADDRESS}\noptions timeout:2 attempts:2\n" if self.transparent and self.rules else ""


# -- parsers: the first bytes


def protocol_of(start: bytes) -> Literal["tls", "http", "other"] | None:
    """Return the protocol of a client's first bytes; None while more are needed.

    Lenient on purpose: anything a server might take for an HTTP/1 request is "http", and the strict parser refuses it.
    """
    if not start:
        return None
    if start[0] == 0x16:
        return None if len(start) < 2 else "tls" if start[1] == 3 else "other"
    line, end, _ = start[: MAX_LINE + 1].partition(b"\n")
    if re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", line):
        return "other"
    if end:
        http2 = line.startswith(b"PRI * HTTP/2")
        return "http" if b"HTTP/" in line.upper() and not http2 else "other"
    if len(line) > MAX_LINE:
        return "http" if re.match(rb"[A-Za-z]{1,32}[ \t]", line) else "other"
    return None


class _Cursor:
    """Reads fields from the front of a message; a truncated field raises ProtocolError."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        field = self.data[self.at : self.at + n]
        if len(field) < n:
            raise ProtocolError("a field goes past the end of its message")
        self.at += n
        return field

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> "_Cursor":
        return _Cursor(self.take(self.number(size)))

    @property
    def more(self) -> bool:
        return self.at < len(self.data)


class ClientHelloReader:
    """Reads the server name of a TLS ClientHello across any record and segment boundaries."""

    def __init__(self) -> None:
        self._raw, self._message, self._fed = bytearray(), bytearray(), 0

    def feed(self, data: bytes) -> str | None:
        """Add bytes; return the server name once it is known, empty if the ClientHello has none."""
        self._raw += data
        self._fed += len(data)
        while self._raw:
            if self._raw[0] != 22 or (len(self._raw) > 1 and self._raw[1] != 3):
                raise ProtocolError("these are not the first bytes of TLS")
            length = int.from_bytes(self._raw[3:5], "big")
            if len(self._raw) >= 5 and not 0 < length <= 1 << 14:
                raise ProtocolError("a TLS record has an impossible length")
            if len(self._raw) < 5 + length:
                break
            self._message += self._raw[5 : 5 + length]
            del self._raw[: 5 + length]
            if (name := self._parse_complete()) is not None:
                return name
        if self._fed > 2 * MAX_HELLO:
            raise ProtocolError("the ClientHello is too long")
        return None

    def _parse_complete(self) -> str | None:
        if self._message[0] != 1:
            raise ProtocolError("the first TLS message is not a ClientHello")
        if len(self._message) < 4:
            return None
        length = int.from_bytes(self._message[1:4], "big")
        if length > MAX_HELLO:
            raise ProtocolError("the ClientHello is too long")
        return None if len(self._message) < 4 + length else _parse_hello(bytes(self._message[4 : 4 + length]))


def _parse_hello(body: bytes) -> str:
    hello = _Cursor(body)
    hello.take(2 + 32)  # version, random
    for size in (1, 2, 1):  # session, ciphers, compressions
        hello.vector(size)
    extensions = hello.vector(2) if hello.more else _Cursor(b"")
    if hello.more:
        raise ProtocolError("bytes after the end of the ClientHello")
    sni: str | None = None
    while extensions.more:
        kind, data = extensions.number(2), extensions.vector(2)
        if kind != 0:
            continue
        names = data.vector(2)
        form, name = names.number(1), names.vector(2).data
        if sni is not None or form != 0 or names.more or data.more:
            raise ProtocolError("expected one server name in the ClientHello")
        sni = _parse_host(name)
    return sni or ""


def _parse_host(name: bytes) -> str:
    try:
        return normalize_host(name.decode("ascii"))
    except (UnicodeError, InputError):
        raise ProtocolError("the server name is not a host name") from None


# -- parsers: DNS

A, AAAA = 1, 28
NOERROR, FORMERR, NXDOMAIN, NOTIMP, REFUSED = 0, 1, 3, 4, 5
TTL_S = 60


@dataclass(frozen=True, slots=True)
class DnsQuestion:
    """One DNS question; `raw` is the bytes that an answer must repeat."""

    name: str
    kind: int
    internet: bool  # class IN
    raw: bytes


def parse_dns_question(packet: bytes) -> DnsQuestion:
    """Parse the question of a standard query; a name that is not a host name raises ProtocolError too."""
    cursor = _Cursor(packet)
    _, flags, questions, answers, authorities, _ = struct.unpack(">6H", cursor.take(12))
    if flags & 0xF800 or (questions, answers, authorities) != (1, 0, 0):
        raise ProtocolError("expected a standard DNS query with one question")
    labels: list[bytes] = []
    while length := cursor.number(1):
        if length > 63 or len(labels) > 126:
            raise ProtocolError("the DNS name is compressed or too long")
        labels.append(cursor.take(length))
    if any(b"." in label for label in labels):
        raise ProtocolError("a DNS label with a dot in it")
    kind, dns_class = cursor.number(2), cursor.number(2)
    return DnsQuestion(_parse_host(b".".join(labels)), kind, dns_class == 1, packet[12 : cursor.at])


def dns_answer(packet: bytes, question: DnsQuestion | None, code: int, address: str | None = None) -> bytes:
    """Return the reply to `packet`: a code and, if given, an address; empty when no reply is due."""
    if len(packet) < 12 or packet[2] & 0x80:  # never answer an answer: two servers would loop forever
        return b""
    flags = 0x8080 | (packet[2] & 0x79) << 8 | code  # recursion available; opcode and "recursion desired" copied
    record = b"" if address is None else struct.pack(">HHHIH", 0xC00C, A, 1, TTL_S, 4)
    record += b"" if address is None else ipaddress.IPv4Address(address).packed
    counts = struct.pack(">4H", question is not None, address is not None, 0, 0)
    return packet[:2] + struct.pack(">H", flags) + counts + (question.raw if question else b"") + record
