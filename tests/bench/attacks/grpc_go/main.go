// Command grpc_go_server answers ShouldRateLimit with OK and Health/Check, to compare grpc-go under the same attacks.
package main

import (
	"context"
	"log"
	"net"
	"os"

	"google.golang.org/grpc"
	_ "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// A RateLimitResponse with code OK has the same bytes as an Int32Value of 1.
func shouldRateLimit(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	if err := decode(new(emptypb.Empty)); err != nil {
		return nil, err
	}
	return wrapperspb.Int32(1), nil
}

func main() {
	listener, err := net.Listen("tcp", os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "envoy.service.ratelimit.v3.RateLimitService",
		HandlerType: (*any)(nil),
		Methods:     []grpc.MethodDesc{{MethodName: "ShouldRateLimit", Handler: shouldRateLimit}},
	}, nil)
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	log.Fatal(server.Serve(listener))
}
