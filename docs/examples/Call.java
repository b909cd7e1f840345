// Asks tollkeeper for a decision: java Call 127.0.0.1:8081

import io.envoyproxy.envoy.extensions.common.ratelimit.v3.RateLimitDescriptor;
import io.envoyproxy.envoy.service.ratelimit.v3.RateLimitRequest;
import io.envoyproxy.envoy.service.ratelimit.v3.RateLimitResponse;
import io.envoyproxy.envoy.service.ratelimit.v3.RateLimitServiceGrpc;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.StatusRuntimeException;
import java.util.concurrent.TimeUnit;

public class Call {
  public static void main(String[] arguments) {
    var channel = Grpc.newChannelBuilder(arguments[0], InsecureChannelCredentials.create()).build();
    var client = RateLimitServiceGrpc.newBlockingStub(channel);

    var login = RateLimitDescriptor.Entry.newBuilder().setKey("login").setValue("ann");
    var request = RateLimitRequest.newBuilder()
        .setDomain("example")
        .addDescriptors(RateLimitDescriptor.newBuilder().addEntries(login))
        .build();
    try {
      var answer = client.withDeadlineAfter(1, TimeUnit.SECONDS).shouldRateLimit(request);
      var status = answer.getStatuses(0);
      if (answer.getOverallCode() == RateLimitResponse.Code.OVER_LIMIT) {
        System.out.println("reject: retry after " + status.getDurationUntilReset().getSeconds() + " s");
      } else {
        System.out.println("pass: " + status.getLimitRemaining() + " left");
      }
    } catch (StatusRuntimeException error) {
      System.out.println("pass: no decision, " + error.getStatus().getCode());
    }
    channel.shutdownNow();
  }
}
