// Calls tollkeeper with grpc-js and checks every answer: node client.js TARGET CALLS.

const assert = require("node:assert");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [target, calls] = [process.argv[2], Number(process.argv[3])];
const CONCURRENCY = 64;
const proto = path.join(__dirname, "../../../proto");
const definition = loader.loadSync("envoy/service/ratelimit/v3/rls.proto", { includeDirs: [proto], enums: String });
const { RateLimitService } = grpc.loadPackageDefinition(definition).envoy.service.ratelimit.v3;
const credentials = grpc.credentials.createInsecure();
const plain = new RateLimitService(target, credentials);
const compressing = new RateLimitService(target, credentials, {
  "grpc.default_compression_algorithm": grpc.compressionAlgorithms.gzip,
});

const request = (key, value) => ({
  domain: "clients",
  descriptors: [{ entries: [{ key: Buffer.from(key), value: Buffer.from(value) }] }],
});

// Overall code, or the status of the error.
const call = (message, { client = plain, options = {}, cancelAfterMs } = {}) =>
  new Promise((resolve) => {
    const started = client.shouldRateLimit(message, options, (error, response) =>
      resolve(error ? grpc.status[error.code] : response.overallCode),
    );
    if (cancelAfterMs !== undefined) setTimeout(() => started.cancel(), cancelAfterMs);
  });

// Makes concurrent calls and counts their results.
const many = async (count, one) => {
  const results = {};
  let next = 0;
  const work = async () => {
    while (next++ < count) {
      const result = await one();
      results[result] = (results[result] ?? 0) + 1;
    }
  };
  await Promise.all(Array.from({ length: CONCURRENCY }, work));
  return results;
};

const check = (what, got, expected) => {
  assert.deepStrictEqual(got, expected, what);
  console.log(`grpc-js ${what}: ${JSON.stringify(got)}`);
};

const main = async () => {
  const run = String(process.hrtime.bigint());
  const open = request("open", run);
  check("calls", await many(calls, () => call(open)), { OK: calls });
  const long = request("open", "x".repeat(2000));
  check("compressed calls", await many(calls / 10, () => call(long, { client: compressing })), { OK: calls / 10 });
  check("a limit of 100", await many(150, () => call(request("hundred", run))), { OK: 100, OVER_LIMIT: 50 });
  const delayed = request("queue", run);
  check("first of a queue", await call(delayed), "OK");
  check("cancelled calls", await many(20, () => call(delayed, { cancelAfterMs: 50 })), { CANCELLED: 20 });
  const options = { deadline: Date.now() + 200 };
  check("delay beyond the deadline", await call(delayed, { options }), "OVER_LIMIT");
  check("deadline that has passed", await call(delayed, { options: { deadline: Date.now() - 1 } }), "DEADLINE_EXCEEDED");
  check("empty domain", await call({}), "INVALID_ARGUMENT");
  check("message of 5 MiB", await call(request("open", "x".repeat(5 << 20))), "RESOURCE_EXHAUSTED");
  check("call at the end", await call(open), "OK");
};

main().then(() => process.exit(0), (error) => {
  console.error(error);
  process.exit(1);
});
