"""Rows about framing: lengths, transfer codings, chunks."""

from __future__ import annotations

from support.corpus.row import (
    GET,
    NEXT,
    POST,
    TE,
    chunks,
    coded,
    header,
    length,
    refused,
    taken,
)

FRAMING = [
    refused("H-01 CL.TE", POST + b"Content-Length: 3\r\n" + TE + b"\r\n3\r\nabc\r\n0\r\n\r\n"),
    refused("H-01 TE.CL", POST + TE + b"Content-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n"),
    refused("H-02 two lengths", POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
    refused("H-03 one length twice", POST + b"Content-Length: 3\r\ncontent-length: 3\r\n\r\nabc"),
    *(
        refused(f"H-04 length {value!r}", length(value))
        for value in (
            *(b"3, 3", b"+3", b"-1", b"0x3", b"3_0", b"", b"3 3", b"3.0", b"\xd9\xa3", b"\x0b3"),
            *(b"18446744073709551616", b"9" * 30, b"3;"),
        )
    ),
    taken("H-04 length with blanks", length(b" 3 \t"), b"abc"),
    *(
        refused(f"H-05 coding {value!r}", coded(value), status)
        for value, status in (
            *((b"identity", 501), (b"xchunked", 501), (b"gzip", 501), (b"gzip, chunked", 501)),
            *((b"chunked, identity", 400), (b"chunked, chunked", 400), (b"chunked,", 400)),
            *((b"", 400), (b"\x0bchunked", 400), (b"chunked\x00", 400)),
        )
    ),
    refused("H-05 two codings", POST + TE + TE + b"\r\n0\r\n\r\n"),
    refused("H-06 two lines", POST + b"Transfer-Encoding: gzip\r\n" + TE + b"\r\n0\r\n\r\n", 501),
    taken("H-05 case", coded(b"Chunked"), b"abc"),
    refused("H-09 HTTP/1.0", coded(b"chunked", b"1.0"), 501),
    *(
        refused(f"H-11 {name!r}", header(name + b": 3\r\n"))
        for name in (b"Content_Length", b"transfer_encoding")
    ),
    refused("H-18 body of a GET", GET + b"Content-Length: 3\r\n\r\nabc"),
    refused("H-18 chunks of a GET", GET + TE + b"\r\n3\r\nabc\r\n0\r\n\r\n"),
    refused("H-18 body of a HEAD", b"HEAD" + GET[3:] + b"Content-Length: 3\r\n\r\nabc"),
    taken("H-18 a GET of length 0", GET + b"Content-Length: 0\r\n\r\n", method="GET"),
    refused("L-05 too large", POST + b"Content-Length: 1001\r\n\r\n" + b"x" * 1001, 413),
    refused("L-05 too large in chunks", chunks(b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n"), 413),
    taken("L-05 just fits", POST + b"Content-Length: 1000\r\n\r\n" + b"x" * 1000, b"x" * 1000),
]
CHUNKS = [
    *(
        refused(f"H-12 chunk size {size!r}", chunks(size + b"\r\nabc\r\n0\r\n\r\n"))
        for size in (
            *(b"0x3", b"+3", b"-1", b" 3", b"3 ", b"3\t", b"", b"1" * 17, b"3 ;a", b"3;", b"g"),
            *(b"3;a=\x01", b"3_"),
        )
    ),
    refused("H-15 LF in an extension", chunks(b"3;a\nb\r\nabc\r\n0\r\n\r\n")),
    refused("H-15 LF behind an extension", chunks(b"3;a\nabc\r\n0\r\n\r\n")),
    refused("H-12 LF", chunks(b"3\nabc\n0\n\n")),
    refused("H-12 nothing after the data", chunks(b"3\r\nabc0\r\n\r\n")),
    refused("H-12 more data than said", chunks(b"3\r\nabcdef\r\n0\r\n\r\n")),
    taken("H-13 zeros", chunks(b"0" * 23 + b"3\r\nabc\r\n0\r\n\r\n"), b"abc"),
    taken("H-14 small extension", chunks(b'3;a="b";c\r\nabc\r\n0\r\n\r\n'), b"abc"),
    refused("H-14 large extension", chunks(b"3;a=" + b"b" * 16384 + b"\r\nabc\r\n0\r\n\r\n")),
    refused("H-14 many extensions", chunks(b"1;%b\r\na\r\n" % (b"b" * 200) * 90 + b"0\r\n\r\n")),
    refused("H-14 zeros without end", chunks(b"0" * 20000 + b"3\r\nabc\r\n0\r\n\r\n")),
    refused("H-14 trailers without end", chunks(b"0\r\n" + b"X: a\r\n" * 4000)),
    refused("H-16 a length in the trailers", chunks(b"3\r\nabc\r\n0\r\nContent-Length: 9\r\n\r\n")),
    refused("H-16 a coding in the trailers", chunks(b"3\r\nabc\r\n0\r\n" + TE + b"\r\n")),
    taken("H-17 trailers", chunks(b"3\r\nabc\r\n0\r\nAuthorization: b\r\nX: y\r\n\r\n"), b"abc"),
    taken("N-01 chunks", chunks(b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"), b"abc"),
    taken("N-01 a request in a chunk", chunks(b"%x\r\n%b\r\n0\r\n\r\n" % (len(NEXT), NEXT)), NEXT),
]
BODY_ROWS = FRAMING + CHUNKS
