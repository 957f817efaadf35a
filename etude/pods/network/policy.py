"""Where a pod may connect to: rules, decisions, the sockets they need, and strict readers of what arrives on those.

A pod has a network of its own with nothing but `lo`. It opens the sockets of `EgressPolicy.listen_specs` there and hands them to
us, so an allowed connection arrives in our process (`gate.py`) and everything else has no route: nothing can fail open.
Pure: no input, no output, no clock. The readers take bytes from untrusted programs; whatever those bytes are, a reader
answers in time linear in them and raises nothing but `ProtocolError`, whose text never repeats what was sent.
"""

import ipaddress
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

from etude.errors import EtudeError, InputError
from etude.pods.pod import Egress

PROXY_ADDRESS, PROXY_PORT = "127.0.0.1", 3128
DNS_ADDRESS, DNS_PORT = "127.0.0.1", 53
FAKE_NETWORK = ipaddress.ip_network("198.18.0.0/15")  # set aside for benchmarks (RFC 2544): no real host has one
WILDCARD_ADDRESS = "198.18.0.1"
FIRST_EXACT = int(ipaddress.ip_address("198.18.1.0"))  # the exact host number N, from 1, is this + N
MAX_RULES = 1000

MAX_HELLO = 16 << 10  # a browser's ClientHello with post-quantum keys is about 2 KiB
MAX_LINE = 8 << 10  # of a first line without an end, before we stop asking what it is

# fmt: off
HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-connection", "proxy-authenticate", "te", "trailer", "transfer-encoding",
    "upgrade", "expect",
})
# Never sent on with a plain HTTP request: what a program in a pod knows of keys must not travel in the clear.
SENSITIVE = frozenset({
    "authorization", "proxy-authorization", "cookie", "cookie2", "x-api-key", "api-key", "x-auth-token",
    "x-access-token", "x-csrf-token", "private-token", "x-amz-security-token", "x-goog-api-key",
})
# fmt: on
CHUNKED, UNTIL_CLOSE = -1, -2  # lengths of a body that are not a number


class ProtocolError(EtudeError):
    """What came on a connection is not what its protocol allows."""


# -- rules


@dataclass(frozen=True, slots=True)
class EgressRule:
    """One allowed destination. A wildcard allows every name below `host`, not `host` itself."""

    host: str  # lower-case ASCII without a trailing dot, or an address in its shortest form
    wildcard: bool
    port: int

    def __str__(self) -> str:
        return ("*." if self.wildcard else "") + authority(self.host, self.port)

    @property
    def literal(self) -> bool:
        """Whether the host is an address."""
        return not self.wildcard and is_address(self.host)

    def covers(self, host: str) -> bool:
        return host.endswith("." + self.host) if self.wildcard else host == self.host


def parse_rule(text: str) -> EgressRule:
    """`host`, `host:port`, `*.host:port`, `1.2.3.4:port` or `[2001:db8::1]:port`; port 443 when none is given."""

    def bad(why: str) -> InputError:
        return InputError(f"egress rule {text!r}: {why}")

    rule = text.strip()
    if "://" in rule:
        raise bad("this is a URL; expected host:port, such as example.org:443")
    if "/" in rule:
        raise bad("expected host:port; networks and paths cannot be allowed, only single hosts and *.names")
    wildcard = rule.startswith("*.")
    rest = rule[2:] if wildcard else rule
    if "@" in rest:
        raise bad("a rule names no user; expected host:port")
    if "*" in rest.partition(":")[0]:
        raise bad("a * stands only at the front, as in *.example.org:443")
    try:
        host, port = split_authority(rest, 443)
    except InputError as error:
        raise bad(str(error)) from None
    if is_address(host):
        if wildcard:
            raise bad("an address has no names below it; leave out the *.")
        address = ipaddress.ip_address(host)
        if address.is_unspecified or address.is_multicast:
            raise bad("nobody can be connected to at this address")
    elif host == "localhost" or host.endswith(".localhost"):
        raise bad(f"localhost is the pod itself; 127.0.0.1:{port} is the machine that runs the pods")
    return EgressRule(host, wildcard, port)


def split_authority(text: str, default_port: int | None) -> tuple[str, int]:
    """Host (as `host_name` gives it) and port of `host:port`; without a default the port must be there."""
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
    return host_name(host), default_port if port is None else int(port)  # type: ignore[return-value]


def host_name(text: str) -> str:
    """The one spelling of a host that everything is compared in: lower-case ASCII (IDNA), shortest address."""
    if len(text) > 255:
        raise InputError("the host name is longer than 253 characters")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        pass
    else:
        if "%" in text:
            raise InputError("an address with a zone (%) means nothing outside its own machine")
        mapped = getattr(address, "ipv4_mapped", None)
        return str(mapped or address)
    try:
        host = text.removesuffix(".").encode("ascii" if text.isascii() else "idna").decode("ascii").lower()
    except UnicodeError:
        raise InputError("the host name is not a valid international name") from None
    labels = host.split(".")
    if len(host) > 253 or not all(re.fullmatch(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", label) for label in labels):
        raise InputError("expected a host name such as example.org, or an IP address")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):  # 127.1 and 0x7f000001 are addresses to some resolvers
        raise InputError("this is neither a name nor an address in the usual form, such as 192.0.2.7")
    return host


def is_address(host: str) -> bool:
    """Whether a host in its one spelling is an address rather than a name."""
    return ":" in host or host.rpartition(".")[2].isdigit()


def authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def forbidden_address(text: str, private_ok: bool = False) -> str:
    """Why an address that a name resolved to must not be dialled; empty when it may be.

    A name's owner decides where it points: without this, `rebind.example.org` could be the cloud's metadata service
    or a database on the operator's own network. Addresses that carry an IPv4 address are judged by that one.
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
    if str(address) == "168.63.129.16":  # public by its number, but answered by the hypervisor of one cloud
        return "a cloud's own service address"
    return "" if address.is_global or private_ok else "not a public address"


# -- policy


@dataclass(frozen=True, slots=True)
class EgressDecision:
    """Whether a connection may be made: the rule that allows it, or the reason why none does."""

    allowed: bool
    rule: EgressRule | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ListenSpec:
    """A socket to open inside the pod: listening when tcp, bound when udp."""

    kind: Literal["tcp", "udp"]
    address: str
    port: int
    role: Literal["proxy", "dns", "carry"]
    host: str = ""  # of a carry: the one host this address stands for; empty when the client's bytes must name it


@dataclass(frozen=True)
class EgressPolicy:
    """The rules of one pod and all that follows from them. Without rules it needs no socket and allows nothing."""

    rules: tuple[EgressRule, ...] = ()
    transparent: bool = False
    private_ok: bool = False  # names may resolve to addresses of private networks; never to this machine's own

    @classmethod
    def from_egress(cls, egress: Egress) -> Self:
        policy = cls(tuple(dict.fromkeys(map(parse_rule, egress.allow))), egress.transparent, egress.private)
        policy._check()
        return policy

    def _check(self) -> None:
        if len(self.rules) > MAX_RULES:
            raise InputError(f"egress: {len(self.rules)} rules are more than {MAX_RULES}; use *.names")
        taken: set[tuple[str, str, int]] = set()
        for listen in self.listen_specs():
            place = (listen.kind, listen.address, listen.port)
            if place in taken:
                at = authority(listen.address, listen.port)
                raise InputError(
                    f"egress: {at} is where the pod itself is served, so it cannot be allowed; another port"
                )
            taken.add(place)
        for rule in self.rules if self.transparent else ():
            if rule.literal and ":" not in rule.host and ipaddress.IPv4Address(rule.host) in FAKE_NETWORK:
                raise InputError(f"egress rule {str(rule)!r}: transparent pods use {FAKE_NETWORK} themselves")

    def decide(self, host: str, port: int) -> EgressDecision:
        """Never raises. An exact rule goes before a wildcard, the longer wildcard before the shorter."""
        try:
            host = host_name(host)
        except InputError:
            return EgressDecision(False, None, "this is not a host name")
        found = [rule for rule in self.rules if rule.port == port and rule.covers(host)]
        if found:
            return EgressDecision(True, min(found, key=lambda rule: (rule.wildcard, -len(rule.host))))
        others = sorted({rule.port for rule in self.rules if rule.covers(host)})
        but = f" (only port {', '.join(map(str, others))})" if others else ""
        return EgressDecision(False, None, f"no rule allows it{but}")

    @cached_property
    def names(self) -> dict[str, str]:
        """The exact names of the rules, each with the address that stands for it in a transparent pod."""
        hosts = dict.fromkeys(rule.host for rule in self.rules if not rule.wildcard and not rule.literal)
        return {host: str(ipaddress.IPv4Address(FIRST_EXACT + n)) for n, host in enumerate(hosts, 1)}

    def lookup(self, name: str) -> str | None:
        """The address a transparent pod's name server gives for an allowed name."""
        if name in self.names:
            return self.names[name]
        return WILDCARD_ADDRESS if any(rule.wildcard and rule.covers(name) for rule in self.rules) else None

    def listen_specs(self) -> list[ListenSpec]:
        """The sockets to open in the pod, in a fixed order.

        An address of the pod's own loopback never goes to a proxy (NO_PROXY), so a rule for one, which means the same
        port of the machine that runs the pods, is carried in both ways. A name that has a rule of its own gets its
        own address, and there the ports of every wildcard above it too.
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
        wild = [rule for rule in self.rules if rule.wildcard]
        exact: dict[str, list[int]] = {}
        for rule in self.rules:
            if not rule.wildcard:
                exact.setdefault(rule.host, []).append(rule.port)
        for host, address in self.names.items():
            ports = sorted({rule.port for rule in wild if rule.covers(host)}.union(exact[host]))
            listen_specs += [ListenSpec("tcp", address, port, "carry", host) for port in ports]
        ports = sorted({rule.port for rule in wild})
        return listen_specs + [ListenSpec("tcp", WILDCARD_ADDRESS, port, "carry") for port in ports]

    def addresses(self) -> list[str]:
        """The addresses to add to the pod's `lo`; those it has anyway are left out."""
        wanted = dict.fromkeys(listen.address for listen in self.listen_specs())
        return [address for address in wanted if not ipaddress.ip_address(address).is_loopback]

    def environment(self) -> dict[str, str]:
        """Variables for the pod's commands; both spellings, because programs read one or the other."""
        if self.transparent or not self.rules:
            return {}
        proxy, direct = f"http://{PROXY_ADDRESS}:{PROXY_PORT}", "localhost,127.0.0.1,::1"
        # No ALL_PROXY: we carry http and https only, and some programs take it for a SOCKS server.
        upper = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "NO_PROXY": direct}
        return upper | {name.lower(): value for name, value in upper.items()}

    def resolv_conf(self) -> str:
        """The pod's /etc/resolv.conf; empty when names are not resolved inside it."""
        return f"nameserver {DNS_ADDRESS}\noptions timeout:2 attempts:2\n" if self.transparent and self.rules else ""


# -- what arrives: the first bytes


def protocol_of(start: bytes) -> Literal["tls", "http", "other"] | None:
    """What a client's first bytes are; None while more are needed to tell.

    Generous on purpose: what any server might take for an HTTP/1 request is "http", and the strict reader refuses it.
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


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What we read of a TLS ClientHello: the server's name, empty when it names none."""

    sni: str


class _Cursor:
    """Takes fields off the front of a message; a field that is cut short is ProtocolError."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        piece = self.data[self.at : self.at + n]
        if len(piece) < n:
            raise ProtocolError("a field goes past the end of its message")
        self.at += n
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> "_Cursor":
        return _Cursor(self.take(self.number(size)))

    @property
    def more(self) -> bool:
        return self.at < len(self.data)


class ClientHelloReader:
    """Reads a ClientHello however its records and segments were cut; feed it bytes until it gives a ClientHello."""

    def __init__(self) -> None:
        self._raw, self._message, self._fed = bytearray(), bytearray(), 0

    def feed(self, data: bytes) -> ClientHello | None:
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
            if (hello := self._complete()) is not None:
                return hello
        if self._fed > 2 * MAX_HELLO:
            raise ProtocolError("the ClientHello is too long")
        return None

    def _complete(self) -> ClientHello | None:
        if self._message[0] != 1:
            raise ProtocolError("the first TLS message is not a ClientHello")
        if len(self._message) < 4:
            return None
        length = int.from_bytes(self._message[1:4], "big")
        if length > MAX_HELLO:
            raise ProtocolError("the ClientHello is too long")
        return None if len(self._message) < 4 + length else _parse_hello(bytes(self._message[4 : 4 + length]))


def _parse_hello(body: bytes) -> ClientHello:
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
        sni = _spelled(name)
    return ClientHello(sni or "")


def _spelled(name: bytes) -> str:
    try:
        return host_name(name.decode("ascii"))
    except (UnicodeError, InputError):
        raise ProtocolError("the server name is not a host name") from None


# -- what arrives: DNS

A, AAAA = 1, 28
NOERROR, FORMERR, NXDOMAIN, NOTIMP, REFUSED = 0, 1, 3, 4, 5
TTL_S = 60


@dataclass(frozen=True, slots=True)
class DnsQuestion:
    """One DNS question, with the bytes that an answer must repeat."""

    name: str
    kind: int
    internet: bool
    raw: bytes


def parse_dns_question(packet: bytes) -> DnsQuestion:
    """The question of a standard query; names that are not host names are ProtocolError too."""
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
    kind, group = cursor.number(2), cursor.number(2)
    return DnsQuestion(_spelled(b".".join(labels)), kind, group == 1, packet[12 : cursor.at])


def dns_answer(packet: bytes, question: DnsQuestion | None, code: int, address: str | None = None) -> bytes:
    """The reply to `packet`: a code and, when there is one, an address; empty when no reply is due."""
    if len(packet) < 12 or packet[2] & 0x80:  # never answer an answer: two servers would talk for ever
        return b""
    flags = 0x8080 | (packet[2] & 0x79) << 8 | code  # recursion offered; opcode and "recursion desired" as asked
    record = b"" if address is None else struct.pack(">HHHIH", 0xC00C, A, 1, TTL_S, 4)
    record += b"" if address is None else ipaddress.IPv4Address(address).packed
    counts = struct.pack(">4H", question is not None, address is not None, 0, 0)
    return packet[:2] + struct.pack(">H", flags) + counts + (question.raw if question else b"") + record


# -- what arrives: HTTP/1


@dataclass(frozen=True, slots=True)
class HttpHead:
    """The first line (three words) and the headers of an HTTP/1 message, as they were written."""

    start: tuple[str, str, str]
    headers: tuple[tuple[str, str], ...]

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    def tokens(self, name: str) -> set[str]:
        return {token.strip().lower() for value in self.values(name) for token in value.split(",")} - {""}

    def kept(self, dropped: Iterable[str]) -> list[tuple[str, str]]:
        """The headers to pass on: not the hop-by-hop ones, not those Connection names, not `dropped`."""
        # Connection may not take away what frames the message.
        without = HOP_BY_HOP | set(dropped) | (self.tokens("connection") - {"content-length", "host"})
        return [(key, value) for key, value in self.headers if key.lower() not in without]


def parse_head(data: bytes) -> HttpHead:
    """Read a head strictly, up to and with its empty line: what two servers could read in two ways is refused."""
    if not data.endswith(b"\r\n\r\n"):
        raise ProtocolError("the HTTP head has no end")
    first, *lines = data[:-4].split(b"\r\n")
    if re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", data.replace(b"\r\n", b"")):
        raise ProtocolError("a control character in the HTTP head")
    words = first.decode("latin-1").split(" ", 2)
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not re.fullmatch(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):  # a folded line starts with a blank
            raise ProtocolError("a header line that is not `name: value`")
        headers.append((name.decode("ascii"), value.decode("latin-1").strip(" \t")))
    if len(words) == 2 and words[0].startswith("HTTP/"):
        words.append("")  # an answer may leave out its phrase
    if len(words) != 3:
        raise ProtocolError("the first line of the HTTP head does not have three words")
    return HttpHead((words[0], words[1], words[2]), tuple(headers))


def _framing(head: HttpHead) -> int | None:
    lengths, codings = head.values("content-length"), head.values("transfer-encoding")
    if lengths and codings:
        raise ProtocolError("both Content-Length and Transfer-Encoding")
    if codings:
        if [coding.lower() for coding in codings] != ["chunked"]:
            raise ProtocolError("a Transfer-Encoding other than chunked")
        return CHUNKED
    if lengths:
        if len(lengths) > 1 or not re.fullmatch(r"[0-9]{1,18}", lengths[0]):
            raise ProtocolError("Content-Length must be there once, as one number")
        return int(lengths[0])
    return None


def request_length(head: HttpHead) -> int:
    """Bytes of a request's body, or CHUNKED. Also checks the rest of what makes a request sound."""
    method, target, version = head.start
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}", method) or not re.fullmatch(r"[!-~]+", target):
        raise ProtocolError("the request line is not `METHOD target HTTP/1.1`")
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise ProtocolError("only HTTP/1.0 and HTTP/1.1 are spoken here")
    hosts = len(head.values("host"))
    if hosts > 1 or (hosts == 0 and version == "HTTP/1.1" and method != "CONNECT"):  # CONNECT names it in its target
        raise ProtocolError("expected one Host header")
    length = _framing(head)
    if length == CHUNKED and version == "HTTP/1.0":
        raise ProtocolError("HTTP/1.0 has no Transfer-Encoding")
    return length or 0


def response_length(head: HttpHead, method: str) -> int:
    """Bytes of a response's body, CHUNKED or UNTIL_CLOSE."""
    version, status, _ = head.start
    if not re.fullmatch(r"HTTP/1\.[01]", version) or not re.fullmatch(r"[1-9][0-9]{2}", status) or status == "101":
        raise ProtocolError("the server's first line is not one of HTTP/1")
    length = _framing(head)
    if method == "HEAD" or status in ("204", "304") or status.startswith("1"):
        return 0
    return UNTIL_CLOSE if length is None else length


def split_target(head: HttpHead, origin_port: int | None) -> tuple[str, int, str]:
    """Host, port and path that a request asks for.

    To a proxy (`origin_port` None) the target is a whole `http://` URL, and Host must agree with it. To what the client
    believes to be the server it is a path, the host is in Host, and the port is the one it connected to.
    """
    target, hosts = head.start[1], head.values("host")
    try:
        if origin_port is not None:
            if not target.startswith("/") and target != "*":
                raise ProtocolError("expected a path in the request line")
            if not hosts:
                raise ProtocolError("without a Host header nobody knows which host is meant")
            host, port = split_authority(hosts[0], origin_port)
            if port != origin_port:
                raise ProtocolError("the Host header names another port")
            return host, port, target
        if target[:7].lower() != "http://":
            raise ProtocolError("expected http://host/path in the request line (https goes through CONNECT)")
        place = re.split(r"[/?#]", target[7:], maxsplit=1)[0]
        host, port = split_authority(place, 80)
        if hosts and split_authority(hosts[0], 80) != (host, port):
            raise ProtocolError("the Host header and the URL name different hosts")
    except InputError:
        raise ProtocolError("the host in the request is not `host` or `host:port`") from None
    path = target[7 + len(place) :]
    return host, port, path if path.startswith("/") else "/" + path


def parse_chunk_size(line: bytes) -> int:
    """The number in the line before a chunk; extensions are allowed and forgotten."""
    size = line.removesuffix(b"\r\n").partition(b";")[0].rstrip(b" \t")
    if not re.fullmatch(rb"[0-9a-fA-F]{1,15}", size) or re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", line[:-2]):
        raise ProtocolError("a chunk does not begin with its size")
    return int(size, 16)
