"""`format` as regular expressions: a part of what each format allows, on which validators agree.

Sources: RFC 3339 for dates and times, ISO 8601 for durations, RFC 5321 for addresses, RFC 1123 for host names,
RFC 4291 for IPv6, RFC 3986 for URIs, RFC 6901 for JSON pointers.
"""

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_N = "(?:0|[1-9][0-9]{0,3})"
_CLOCK = f"(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_ATOM = r"[A-Za-z0-9_+]{1,20}(?:[.\-][A-Za-z0-9_+]{1,20}){0,2}"
_LABEL = "[A-Za-z](?:[A-Za-z0-9]{0,30}(?:-[A-Za-z0-9]{1,15}){0,2})"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,2}}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_HEX = "[0-9a-fA-F]"
_WORD = f"{_HEX}{{1,4}}"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
_PATH = r"[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-F]{2}"
_TAIL = rf"(?:/(?:{_PATH})*)*(?:\?(?:{_PATH}|[/?])*)?(?:\x23(?:{_PATH}|[/?])*)?"
_URI = rf"[a-z][a-z0-9+.\-]{{0,15}}:(?://(?:{_HOST}|{_IPV4})(?::[0-9]{{1,4}})?{_TAIL}|[A-Za-z0-9](?:{_PATH})*)"


def _ipv6() -> str:
    """Eight groups, or a double colon that stands for two or more of them."""
    full = f"(?:{_WORD}:){{7}}{_WORD}"
    short = [
        (f"(?:{_WORD}:){{{left - 1}}}{_WORD}" if left else "")
        + "::"
        + (f"(?:{_WORD}:){{{right - 1}}}{_WORD}" if right else "")
        for left in range(7)
        for right in range(7 - left)
    ]
    return "|".join([full, *short])


FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:T{_CLOCK})?|T{_CLOCK}|{_N}W)",
    "email": rf"{_ATOM}@{_HOST}",
    "idn-email": rf"{_ATOM}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": _UUID,
    "uri": _URI,
    "iri": _URI,
    "uri-reference": f"{_URI}|{_TAIL}",
    "iri-reference": f"{_URI}|{_TAIL}",
    "json-pointer": "(?:/(?:[^/~]|~[01])*)*",
}
# Formats that validators check, and no expression here covers. Any other name is an annotation.
UNSUPPORTED = {"regex", "uri-template", "relative-json-pointer", "idn-hostname", "color", "ip-address", "host-name"}
