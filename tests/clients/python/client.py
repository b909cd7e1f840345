"""Calls tollkeeper with grpcio (gRPC C-core) and checks every answer: client.py TARGET CALLS."""

import collections
import concurrent.futures
import pathlib
import sys
import time

import grpc

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "proto"))
protos, services = grpc.protos_and_services("envoy/service/ratelimit/v3/rls.proto")
TARGET, CALLS = sys.argv[1], int(sys.argv[2])
CONCURRENCY = 32
# Over a unix socket grpcio's own authority is the escaped path, which HTTP/2 servers on h2 refuse.
OPTIONS = [("grpc.default_authority", "tollkeeper")]
stub = services.RateLimitServiceStub(grpc.insecure_channel(TARGET, options=OPTIONS))


def request(key, value):
    message = protos.RateLimitRequest(domain="clients")
    message.descriptors.add().entries.add(key=key.encode(), value=value.encode())
    return message


def result(get):
    """Overall code, or the status of the error."""
    try:
        return protos.RateLimitResponse.Code.Name(get().overall_code)
    except grpc.FutureCancelledError:
        return "CANCELLED"
    except grpc.RpcError as error:
        return error.code().name


def call(message, **options):
    return result(lambda: stub.ShouldRateLimit(message, **options))


def cancelled(message):
    future = stub.ShouldRateLimit.future(message)
    time.sleep(0.05)
    future.cancel()
    return result(future.result)


def many(count, one):
    """Makes concurrent calls and counts their results."""
    with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as pool:
        return dict(collections.Counter(pool.map(lambda _: one(), range(count))))


def check(what, got, expected):
    if got != expected:
        sys.exit(f"{what}: {got}, expected {expected}")
    print(f"grpcio {what}: {got}")


run = str(time.time_ns())
opened, delayed = request("open", run), request("queue", run)
check("calls", many(CALLS, lambda: call(opened)), {"OK": CALLS})
long = request("open", "x" * 2000)
gzip = grpc.Compression.Gzip
check("compressed calls", many(CALLS // 10, lambda: call(long, compression=gzip)), {"OK": CALLS // 10})
check("a limit of 100", many(150, lambda: call(request("hundred", run))), {"OK": 100, "OVER_LIMIT": 50})
check("first of a queue", call(delayed), "OK")
check("cancelled calls", many(20, lambda: cancelled(delayed)), {"CANCELLED": 20})
check("delay beyond the deadline", call(delayed, timeout=0.2), "OVER_LIMIT")
check("deadline that has passed", call(delayed, timeout=-1), "DEADLINE_EXCEEDED")
check("empty domain", call(protos.RateLimitRequest()), "INVALID_ARGUMENT")
check("message of 5 MiB", call(request("open", "x" * (5 << 20))), "RESOURCE_EXHAUSTED")
check("call at the end", call(opened), "OK")
