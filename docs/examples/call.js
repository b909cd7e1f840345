// Asks tollkeeper for a decision: node call.js 127.0.0.1:8081

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const xds = path.dirname(require.resolve("@grpc/grpc-js-xds/package.json"));
const definition = loader.loadSync("envoy/service/ratelimit/v3/rls.proto", {
  includeDirs: ["envoy-api", "googleapis", "protoc-gen-validate", "xds"].map((name) => path.join(xds, "deps", name)),
  defaults: true,
  enums: String,
});
const { RateLimitService } = grpc.loadPackageDefinition(definition).envoy.service.ratelimit.v3;
const client = new RateLimitService(process.argv[2], grpc.credentials.createInsecure());

const request = { domain: "example", descriptors: [{ entries: [{ key: "login", value: "ann" }] }] };
client.shouldRateLimit(request, { deadline: Date.now() + 1000 }, (error, answer) => {
  if (error) {
    console.log(`pass: no decision, ${grpc.status[error.code]}`);
  } else if (answer.overallCode === "OVER_LIMIT") {
    console.log(`reject: retry after ${answer.statuses[0].durationUntilReset.seconds} s`);
  } else {
    console.log(`pass: ${answer.statuses[0].limitRemaining} left`);
  }
  client.close();
});
