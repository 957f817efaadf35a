"""Egress rules, the sockets they need, and the parsers of untrusted bytes."""

import contextlib
import ssl
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import InputError
from etude.pods.network import http
from etude.pods.network import policy as egress
from etude.pods.network.policy import (
    ClientHelloReader,
    EgressPolicy,
    EgressRule,
    ListenSpec,
    ProtocolError,
    parse_rule,
)
from etude.pods.pod import Egress


def client_hello(name: str | None) -> bytes:
    """Return the first flight of a real TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def in_records(flight: bytes, size: int) -> bytes:
    """Return the same ClientHello, split into records of `size` bytes."""
    message = flight[5:]
    parts = [message[i : i + size] for i in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + struct.pack(">H", len(part)) + part for part in parts)


def query(name: str, kind: int = egress.A, flags: int = 0x0100) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack(">6H", 7, flags, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


# -- rules


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("example.org", EgressRule("example.org", False, 443)),
        (" Example.ORG.:8080 ", EgressRule("example.org", False, 8080)),
        ("*.Example.org:443", EgressRule("example.org", True, 443)),
        ("bücher.example:80", EgressRule("xn--bcher-kva.example", False, 80)),
        ("192.0.2.7:22", EgressRule("192.0.2.7", False, 22)),
        ("[2001:DB8:0::1]:443", EgressRule("2001:db8::1", False, 443)),
        ("[::ffff:192.0.2.7]", EgressRule("192.0.2.7", False, 443)),
        ("_srv.a-b.example.org", EgressRule("_srv.a-b.example.org", False, 443)),
    ],
)
def test_a_rule_is_normalized(text: str, rule: EgressRule) -> None:
    assert parse_rule(text) == rule
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("https://example.org", "URL"),
        ("10.0.0.0/8", "networks"),
        ("example.org:80-90", "ranges"),
        ("example.org:*", "port"),
        ("example.org:0", "port"),
        ("example.org:65536", "port"),
        ("example.org:٣", "port"),
        ("2001:db8::1", "brackets"),
        ("[2001:db8::1", "brackets"),
        ("[example.org]:443", "brackets"),
        ("[fe80::1%eth0]:443", "zone"),
        ("*", "front"),
        ("a.*.org", "front"),
        ("*.*.org", "front"),
        ("*.192.0.2.7", "no names below"),
        ("0.0.0.0:80", "address"),
        ("127.1:80", "neither"),
        ("0x7f000001:80", "neither"),
        ("localhost:8000", "127.0.0.1:8000"),
        ("user:secret@example.org", "no user"),
        ("a b.example.org", "host name"),
        ("-a.example.org", "host name"),
        ("a" * 64 + ".org", "host name"),
        (("a" * 60 + ".") * 6 + "org", "253"),
        ("", "host name"),
        (":443", "host name"),
    ],
)
def test_an_invalid_rule_is_explained(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        parse_rule(text)
    assert repr(text) in str(error.value)


@given(st.text(max_size=40))
def test_parsing_a_rule_returns_a_rule_or_raises_an_input_error(text: str) -> None:
    try:
        rule = parse_rule(text)
    except InputError:
        return
    assert parse_rule(str(rule)) == rule


def test_only_rules_allow_a_connection() -> None:
    policy = EgressPolicy.from_egress(
        Egress.to("example.org", "*.example.org:443", "*.a.example.org:443", "192.0.2.7:22")
    )
    for host, port, rule in [
        ("example.org", 443, "example.org:443"),
        ("EXAMPLE.org.", 443, "example.org:443"),
        ("b.example.org", 443, "*.example.org:443"),
        ("b.a.example.org", 443, "*.a.example.org:443"),
        ("::ffff:192.0.2.7", 22, "192.0.2.7:22"),
    ]:
        assert str(policy.decide(host, port).rule) == rule
    for host, port in [
        ("example.org", 80),
        ("notexample.org", 443),
        ("example.org.evil.example", 443),
        ("192.0.2.7", 443),
        ("3221225991", 22),
        ("exa mple.org", 443),
        ("", 443),
    ]:
        assert not policy.decide(host, port).allowed
    assert "only port 443" in policy.decide("example.org", 80).reason


def test_without_rules_a_pod_opens_no_socket() -> None:
    for transparent in (False, True):
        policy = EgressPolicy.from_egress(Egress(transparent=transparent))
        assert not policy.decide("example.org", 443).allowed
        assert (policy.listen_specs(), policy.addresses(), policy.environment(), policy.resolv_conf()) == (
            [],
            [],
            {},
            "",
        )


def test_proxy_mode_needs_one_socket_and_the_usual_variables() -> None:
    policy = EgressPolicy.from_egress(Egress.to("example.org", "127.0.0.1:8000"))
    carried = ListenSpec("tcp", "127.0.0.1", 8000, "carry", "127.0.0.1")  # NO_PROXY keeps it from the proxy
    assert policy.listen_specs() == [ListenSpec("tcp", "127.0.0.1", 3128, "proxy"), carried]
    environment = policy.environment()
    assert environment["https_proxy"] == environment["HTTP_PROXY"] == "http://127.0.0.1:3128"
    assert environment["no_proxy"].startswith("localhost,127.0.0.1")
    assert (policy.addresses(), policy.resolv_conf()) == ([], "")


def test_transparent_mode_gives_every_host_an_address() -> None:
    rules = ("b.example.org:22", "a.example.org", "*.example.org:8080", "192.0.2.7:5432")
    policy = EgressPolicy.from_egress(Egress.to(*rules, transparent=True))
    assert policy.listen_specs() == [
        ListenSpec("udp", "127.0.0.1", 53, "dns"),
        ListenSpec("tcp", "127.0.0.1", 53, "dns"),
        ListenSpec("tcp", "192.0.2.7", 5432, "carry", "192.0.2.7"),
        ListenSpec("tcp", "198.18.1.1", 22, "carry", "b.example.org"),
        ListenSpec("tcp", "198.18.1.1", 8080, "carry", "b.example.org"),  # the wildcard's port, at its own address
        ListenSpec("tcp", "198.18.1.2", 443, "carry", "a.example.org"),
        ListenSpec("tcp", "198.18.1.2", 8080, "carry", "a.example.org"),
        ListenSpec("tcp", "198.18.0.1", 8080, "carry"),
    ]
    assert policy.addresses() == ["192.0.2.7", "198.18.1.1", "198.18.1.2", "198.18.0.1"]
    assert policy.environment() == {}
    assert "nameserver 127.0.0.1" in policy.resolv_conf()
    assert policy.lookup("a.example.org") == "198.18.1.2"
    assert policy.lookup("z.example.org") == "198.18.0.1"
    assert policy.lookup("example.org") is None
    assert policy.lookup("192.0.2.7") is None


def test_three_hundred_hosts_have_three_hundred_addresses() -> None:
    policy = EgressPolicy.from_egress(Egress.to(*(f"h{n}.example.org" for n in range(300)), transparent=True))
    assert len(set(policy.addresses())) == 300
    assert policy.lookup("h299.example.org") == "198.18.2.44"


@pytest.mark.parametrize("rule", ["127.0.0.1:53", "198.18.5.5:80"])
def test_addresses_used_by_transparent_mode_cannot_be_allowed(rule: str) -> None:
    with pytest.raises(InputError, match=r"127\.0\.0\.1:53|198\.18\.5\.5"):
        EgressPolicy.from_egress(Egress.to(rule, transparent=True))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "100.100.100.200",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "198.18.0.1",
        "168.63.129.16",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "ff02::1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::a00:1",
        "2002:7f00:1::",
        "nonsense",
    ],
)
def test_non_public_addresses_are_forbidden(address: str) -> None:
    assert egress.forbidden_address(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_public_addresses_are_not_forbidden(address: str) -> None:
    assert egress.forbidden_address(address) == ""


# -- TLS


@pytest.mark.parametrize("name", ["example.org", None])
def test_the_server_name_is_read_across_any_record_and_segment_boundaries(name: str | None) -> None:
    for flight in (client_hello(name), in_records(client_hello(name), 7)):
        for step in (1, 3, 100, len(flight)):
            reader = ClientHelloReader()
            pieces = [flight[i : i + step] for i in range(0, len(flight), step)]
            answers = [reader.feed(piece) for piece in pieces]
            assert answers[:-1] == [None] * (len(pieces) - 1)
            assert answers[-1] == (name or "")
    assert ClientHelloReader().feed(client_hello("example.org") + b"early data" * 9000) == "example.org"


def test_an_endless_client_hello_is_refused() -> None:
    pieces = [b"\x16\x03\x01\x00\x01" + bytes([byte]) for byte in b"\x01\x00\x3f\xff" + bytes(10_000)]
    for flight in (b"".join(pieces), b"\x16\x03\x01\x00\x04\x01\xff\xff\xff"):
        with pytest.raises(ProtocolError, match="too long"):
            ClientHelloReader().feed(flight)


@settings(max_examples=300)
@given(st.data())
def test_any_bytes_are_a_client_hello_or_a_protocol_error(data: st.DataObject) -> None:
    flight = bytearray(_FLIGHT)
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(flight) - 1))
        flight[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    raw = data.draw(st.one_of(st.just(bytes(flight)), st.binary(max_size=200), st.just(bytes(flight[5:]))))
    for message in (raw, b"\x16\x03\x01" + struct.pack(">H", len(raw) or 1) + raw):
        try:
            found = ClientHelloReader().feed(message)
        except ProtocolError:
            continue
        assert found is None or isinstance(found, str)


_FLIGHT = client_hello("example.org")


# -- DNS


def test_a_dns_answer_repeats_its_question() -> None:
    packet = query("A.Example.org")
    question = egress.parse_dns_question(packet)
    assert (question.name, question.kind, question.internet) == ("a.example.org", egress.A, True)
    answer = egress.dns_answer(packet, question, egress.NOERROR, "198.18.1.1")
    assert struct.unpack(">6H", answer[:12]) == (7, 0x8180, 1, 1, 0, 0)
    assert answer[12 : 12 + len(question.raw)] == packet[12:]
    assert answer[-4:] == bytes([198, 18, 1, 1])
    assert egress.dns_answer(packet, question, egress.NXDOMAIN)[3] & 15 == egress.NXDOMAIN
    assert egress.dns_answer(answer, question, egress.NOERROR) == b""  # an answer is not answered


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        query("example.org")[:-1],
        query("example.org", flags=0x8180),
        query("example.org", flags=0x2800),
        query("example.org").replace(b"\x07example", b"\xc0\x0cxample"),
        query("example.org").replace(b"example", b"exa.ple"),
        query("exa mple.org"),
        struct.pack(">6H", 7, 0x100, 2, 0, 0, 0) + query("example.org")[12:],
    ],
)
def test_an_invalid_dns_question_is_a_protocol_error(packet: bytes) -> None:
    with pytest.raises(ProtocolError):
        egress.parse_dns_question(packet)


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=80), st.binary(max_size=60).map(lambda tail: query("a")[:12] + tail)))
def test_any_packet_is_a_dns_question_or_a_protocol_error(packet: bytes) -> None:
    try:
        question = egress.parse_dns_question(packet)
    except ProtocolError:
        assert egress.dns_answer(packet, None, egress.FORMERR)[:2] in (b"", packet[:2])
    else:
        assert packet[12:].startswith(question.raw)


# -- HTTP


def request(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


@pytest.mark.parametrize(
    "data",
    [
        request("GET / HTTP/1.1", "Host: a", "Content-Length: 1", "Transfer-Encoding: chunked"),
        request("GET / HTTP/1.1", "Host: a", "Content-Length: 1", "Content-Length: 1"),
        request("GET / HTTP/1.1", "Host: a", "Content-Length: 1, 1"),
        request("GET / HTTP/1.1", "Host: a", "Content-Length: +1"),
        request("GET / HTTP/1.1", "Host: a", "Transfer-Encoding: gzip, chunked"),
        request("GET / HTTP/1.1", "Host: a", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        request("GET / HTTP/1.0", "Host: a", "Transfer-Encoding: chunked"),
        request("GET / HTTP/1.1", "Host: a", "X: 1", " folded"),
        request("GET / HTTP/1.1", "Host: a", "X : 1"),
        request("GET / HTTP/1.1", "Host: a", "X: \x00"),
        request("GET / HTTP/1.1", "Host: a", "X: 1\nY: 2"),
        request("GET / HTTP/1.1", "Host: a", "X: 1\rY: 2"),
        request("GET / HTTP/1.1", "Host: a", "no colon"),
        request("GET / HTTP/1.1"),
        request("GET / HTTP/1.1", "Host: a", "Host: a"),
        request("GET / HTTP/2.0", "Host: a"),
        request("GET  / HTTP/1.1", "Host: a"),
        request("GET /\xff HTTP/1.1", "Host: a"),
        request("GET", "Host: a"),
        b"GET / HTTP/1.1\r\nHost: a\r\n",
        b"GET / HTTP/1.1\nHost: a\n\n\r\n\r\n",
    ],
)
def test_an_ambiguous_request_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        http.parse_request(data)


def test_the_target_and_the_host_must_agree() -> None:
    def target(first: str, host: str, port: int | None = None) -> tuple[str, int, str]:
        return http.split_target(http.parse_request(request(first, f"Host: {host}"))[1], port)

    assert target("GET http://A.example.org?q HTTP/1.1", "a.example.org:80") == ("a.example.org", 80, "/?q")
    assert target("GET HTTP://[2001:db8::1]:81/x HTTP/1.1", "[2001:db8::1]:81") == ("2001:db8::1", 81, "/x")
    assert target("GET /x HTTP/1.1", "a.example.org", 8080) == ("a.example.org", 8080, "/x")
    for first, host, port in [
        ("GET http://a.example.org/ HTTP/1.1", "b.example.org", None),
        ("GET http://a.example.org/ HTTP/1.1", "a.example.org:81", None),
        ("GET http://me:secret@a.example.org/ HTTP/1.1", "a.example.org", None),
        ("GET https://a.example.org/ HTTP/1.1", "a.example.org", None),
        ("GET / HTTP/1.1", "a.example.org", None),
        ("GET http://a.example.org/ HTTP/1.1", "a.example.org", 80),
        ("GET / HTTP/1.1", "a.example.org:81", 80),
        ("GET / HTTP/1.1", "", 80),
    ]:
        with pytest.raises(ProtocolError) as error:
            target(first, host, port)
        assert "secret" not in str(error.value)


def test_hop_by_hop_and_sensitive_headers_are_not_forwarded() -> None:
    lines = (
        "Connection: X-Mine, Content-Length",
        "X-Mine: 1",
        "TE: trailers",
        "Cookie: s",
        "Content-Length: 3",
        "A: b",
    )
    _, head = http.parse_request(request("POST / HTTP/1.1", "Host: a", *lines))
    assert http.forwarded(head, http.SENSITIVE) == [(b"Host", b"a"), (b"Content-Length", b"3"), (b"A", b"b")]


@given(st.binary(max_size=120))
def test_any_head_is_parsed_or_a_protocol_error(data: bytes) -> None:
    for message in (data, b"GET / HTTP/1.1\r\n" + data + b"\r\n\r\n", data + b" / HTTP/1.1\r\nHost: a\r\n\r\n"):
        egress.protocol_of(message)
        with contextlib.suppress(ProtocolError):
            http.split_target(http.parse_request(message)[1], None)


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"", None),
        (b"\x16", None),
        (b"\x16\x03", "tls"),
        (b"\x16\x02", "other"),
        (b"G", None),
        (b"GET / HTTP/1.1\r\n", "http"),
        (b"get  / http/1.1\n", "http"),
        (b"PRI * HTTP/2.0\r\n", "other"),
        (b"SSH-2.0-x\r\n", "other"),
        (b"AMQP\x00", "other"),
        (b"GET /" + b"a" * egress.MAX_LINE, "http"),
        (b"a" * (egress.MAX_LINE + 1), "other"),
    ],
)
def test_the_protocol_is_detected_from_the_first_bytes(start: bytes, kind: str | None) -> None:
    assert egress.protocol_of(start) == kind


@pytest.mark.parametrize(
    ("address", "plain", "behind"),
    [
        ("10.1.2.3", False, True),
        ("203.0.113.9", False, True),
        ("fd00::1", False, True),
        ("93.184.215.14", True, True),
        ("127.0.0.1", False, False),
        ("169.254.169.254", False, False),
        ("::ffff:127.0.0.1", False, False),
        ("168.63.129.16", False, False),
        ("0.0.0.0", False, False),
    ],
)
def test_private_networks_can_be_allowed_but_never_this_machine_or_metadata(
    address: str, plain: bool, behind: bool
) -> None:
    assert (egress.forbidden_address(address) == "") is plain
    assert (egress.forbidden_address(address, private_ok=True) == "") is behind
