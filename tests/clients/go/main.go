// Command client calls tollkeeper with grpc-go and checks every answer: client TARGET CALLS.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimit "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	health "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

const concurrency = 64

var client ratelimit.RateLimitServiceClient

func request(key, value string) *ratelimit.RateLimitRequest {
	entries := []*common.RateLimitDescriptor_Entry{{Key: key, Value: value}}
	return &ratelimit.RateLimitRequest{Domain: "clients", Descriptors: []*common.RateLimitDescriptor{{Entries: entries}}}
}

// call returns the overall code, or the status of the error.
func call(ctx context.Context, request *ratelimit.RateLimitRequest, options ...grpc.CallOption) string {
	response, err := client.ShouldRateLimit(ctx, request, options...)
	if err != nil {
		return status.Code(err).String()
	}
	return response.OverallCode.String()
}

// many makes concurrent calls and counts their results.
func many(count int, one func(number int) string) map[string]int {
	var mutex sync.Mutex
	var group sync.WaitGroup
	var next atomic.Int64
	results := map[string]int{}
	for range concurrency {
		group.Add(1)
		go func() {
			defer group.Done()
			for number := next.Add(1); number <= int64(count); number = next.Add(1) {
				result := one(int(number))
				mutex.Lock()
				results[result]++
				mutex.Unlock()
			}
		}()
	}
	group.Wait()
	return results
}

func check(what string, got, expected any) {
	if fmt.Sprint(got) != fmt.Sprint(expected) {
		log.Fatalf("%s: %v, expected %v", what, got, expected)
	}
	fmt.Printf("grpc-go %s: %v\n", what, got)
}

func main() {
	target := os.Args[1]
	count, _ := strconv.Atoi(os.Args[2])
	connection, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	client = ratelimit.NewRateLimitServiceClient(connection)
	background := context.Background()
	run := fmt.Sprint(time.Now().UnixNano())

	check("calls", many(count, func(int) string { return call(background, request("open", run)) }), map[string]int{"OK": count})
	check("compressed calls", many(count/10, func(int) string {
		return call(background, request("open", strings.Repeat("x", 2000)), grpc.UseCompressor(gzip.Name))
	}), map[string]int{"OK": count / 10})
	check("a limit of 100", many(150, func(int) string { return call(background, request("hundred", run)) }),
		map[string]int{"OK": 100, "OVER_LIMIT": 50})
	delayed := request("queue", run)
	check("first of a queue", call(background, delayed), "OK")
	check("cancelled calls", many(20, func(int) string {
		ctx, cancel := context.WithCancel(background)
		time.AfterFunc(50*time.Millisecond, cancel)
		return call(ctx, delayed)
	}), map[string]int{"Canceled": 20})
	deadline, cancel := context.WithTimeout(background, 200*time.Millisecond)
	check("delay beyond the deadline", call(deadline, delayed), "OVER_LIMIT")
	cancel()
	passed, cancel := context.WithTimeout(background, time.Nanosecond)
	check("deadline that has passed", call(passed, delayed), "DeadlineExceeded")
	cancel()
	check("empty domain", call(background, &ratelimit.RateLimitRequest{}), codes.InvalidArgument)
	check("message of 5 MiB", call(background, request("open", strings.Repeat("x", 5<<20))), codes.ResourceExhausted)
	check("unknown method", status.Code(connection.Invoke(background, "/no.such.Service/Method", delayed, delayed)), codes.Unimplemented)
	for name, expected := range map[string]string{"": "SERVING", "no.such.Service": "SERVICE_UNKNOWN"} {
		watch, err := health.NewHealthClient(connection).Watch(background, &health.HealthCheckRequest{Service: name})
		if err != nil {
			log.Fatal(err)
		}
		response, err := watch.Recv()
		check("health watch", fmt.Sprint(response.GetStatus(), err), expected+" <nil>")
	}
	check("call at the end", call(background, request("open", run)), "OK")
}
