"""Messages of RLS and RLQS as bytes, for the benches of quotas.

Written by hand, because a hostile client sends what no generated code can: ids that are not UTF-8, for example.
"""

QUOTA_METHOD = "/envoy.service.rate_limit_quota.v3.RateLimitQuotaService/StreamRateLimitQuotas"
DECIDE_METHOD = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
OK = 1


def varint(number):
    encoded = bytearray()
    number &= 2**64 - 1
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def number_field(field, number):
    return varint(field << 3) + varint(number)


def bytes_field(field, content):
    return varint(field << 3 | 2) + varint(len(content)) + content


def read_varint(data, at):
    number, shift = 0, 0
    while True:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return number, at


def decode(data):
    """Fields of a message: a list of numbers and bytes for each field number."""
    fields, at = {}, 0
    while at < len(data):
        tag, at = read_varint(data, at)
        if tag & 7 == 0:
            value, at = read_varint(data, at)
        elif tag & 7 == 2:
            length, at = read_varint(data, at)
            value, at = data[at:at + length], at + length
        else:
            raise ValueError(f"wire type {tag & 7}")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def bucket_id(entries):
    """A BucketId; keys and values are bytes."""
    return b"".join(bytes_field(1, bytes_field(1, key) + bytes_field(2, value)) for key, value in entries.items())


def read_bucket_id(data):
    entries = [decode(entry) for entry in decode(data).get(1, [])]
    return {entry.get(1, [b""])[0]: entry.get(2, [b""])[0] for entry in entries}


def usage(bucket, allowed, denied, elapsed_s=5, elapsed_ns=0):
    """A BucketQuotaUsage of an encoded id."""
    elapsed = number_field(1, elapsed_s) + number_field(2, elapsed_ns)
    return bytes_field(1, bucket) + bytes_field(2, elapsed) + number_field(3, allowed) + number_field(4, denied)


def report(domain, usages):
    """RateLimitQuotaUsageReports of encoded usages."""
    return bytes_field(1, domain.encode()) + b"".join(bytes_field(2, one) for one in usages)


def read_actions(data):
    """Actions of a RateLimitQuotaResponse: id, and `abandon`, a blanket rule, (max, fill, seconds) or `other`."""
    actions = []
    for encoded in decode(data).get(1, []):
        action = decode(encoded)
        bucket = read_bucket_id(action.get(1, [b""])[0])
        if 3 in action:
            actions.append((bucket, "abandon"))
            continue
        strategy = decode(decode(action[2][0]).get(3, [b""])[0])
        if 3 in strategy:
            tokens = decode(strategy[3][0])
            fill = decode(tokens.get(2, [b""])[0]).get(1, [0])[0]
            seconds = decode(tokens.get(3, [b""])[0]).get(1, [0])[0]
            actions.append((bucket, (tokens.get(1, [0])[0], fill, seconds)))
        elif 2 in strategy:
            actions.append((bucket, "other"))
        else:
            actions.append((bucket, "deny" if strategy.get(1, [0])[0] else "allow"))
    return actions


def decide_request(domain, entries, hits=1):
    """RateLimitRequest with one descriptor."""
    descriptor = b"".join(bytes_field(1, bytes_field(1, key) + bytes_field(2, value)) for key, value in entries.items())
    return bytes_field(1, domain.encode()) + bytes_field(2, descriptor) + number_field(3, hits)


def is_admitted(response):
    """Whether the overall code of a RateLimitResponse is OK."""
    return decode(response).get(1, [0])[0] == OK
