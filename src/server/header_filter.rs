//! Changes header blocks of HTTP/2 requests that h2 would refuse, before h2 reads them.
//!
//! h2 resets a stream whose `:authority` is not one of a URI, such as the name of an Istio cluster, and ends the
//! connection if the headers of one call are far too large. Envoy then lets requests through without a limit. No answer
//! depends on these headers, so their values are replaced; the file `hpack.rs` says how.
//!
//! Frames that need no change are not copied: they are inspected in the buffer of the caller. A header block that is
//! changed, or that was not read in one piece, goes through a buffer of its own, frame by frame.

mod frames;
mod hpack;

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use self::frames::FrameFilter;

/// Connection whose inbound header blocks are filtered.
#[derive(Debug)]
pub(super) struct HeaderFilter<I> {
    io: I,
    frames: FrameFilter,
}

impl<I> HeaderFilter<I> {
    /// Filters what is read from `io`, from the connection preface on.
    pub(super) fn new(io: I) -> Self {
        Self { io, frames: FrameFilter::new() }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for HeaderFilter<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { io, frames } = &mut *self;
        loop {
            if frames.give(buffer) {
                return Poll::Ready(Ok(()));
            }
            let before = buffer.filled().len();
            ready!(Pin::new(&mut *io).poll_read(context, buffer))?;
            let read = &buffer.filled()[before..];
            if read.is_empty() {
                // An incomplete frame before the end of the stream is an error that h2 reports.
                frames.finish();
                frames.give(buffer);
                return Poll::Ready(Ok(()));
            }
            let passed = frames.take(read);
            buffer.set_filled(before + passed);
            if passed > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for HeaderFilter<I> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;

    /// Request headers: the number of a name, a value, and true if it must not enter the header table.
    type Headers = Vec<(u8, String, bool)>;

    /// Headers as a server behind a filter gets them, with the authority as `host`; the filter reads up to
    /// `piece_bytes` at once.
    async fn filtered(requests: &[Headers], piece_bytes: usize) -> Vec<HeaderMap> {
        let (client, server) = tokio::io::duplex(1 << 16);
        let server = Pieces { io: server, piece_bytes };
        let serving = tokio::spawn(async move {
            let mut received = Vec::new();
            let mut builder = h2::server::Builder::new();
            builder.max_header_list_size(1 << 20);
            let mut connection = builder.handshake::<_, Bytes>(HeaderFilter::new(server)).await.expect("it is HTTP/2");
            while let Some(request) = connection.accept().await {
                let (request, mut response) = request.expect("the request is valid");
                let mut headers = request.headers().clone();
                let authority = request.uri().authority().expect("it is sent").as_str();
                headers.insert("host", HeaderValue::from_str(authority).expect("it is text"));
                received.push(headers);
                response.send_response(Response::new(()), true).expect("the client waits");
            }
            received
        });
        let (mut sender, connection) = h2::client::handshake(client).await.expect("it is HTTP/2");
        let connection = tokio::spawn(connection);
        for request in requests {
            sender = sender.ready().await.expect("the connection lives");
            let mut message = Request::get("http://tollkeeper.example:8081/path").body(()).expect("it is valid");
            for (name, value, is_sensitive) in request {
                let mut value = HeaderValue::from_str(value).expect("it is text");
                value.set_sensitive(*is_sensitive);
                message.headers_mut().append(header_name(*name), value);
            }
            let (response, _) = sender.send_request(message, true).expect("the connection lives");
            response.await.expect("the request is answered");
        }
        drop(sender);
        connection.await.expect("no panic").expect("no error");
        serving.await.expect("no panic")
    }

    /// Connection that gives at most `piece_bytes` at once.
    struct Pieces {
        io: tokio::io::DuplexStream,
        piece_bytes: usize,
    }

    impl AsyncRead for Pieces {
        fn poll_read(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            let mut piece = vec![0; self.piece_bytes.min(buffer.remaining())];
            let mut piece = ReadBuf::new(&mut piece);
            ready!(Pin::new(&mut self.io).poll_read(context, &mut piece))?;
            buffer.put_slice(piece.filled());
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for Pieces {
        fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            Pin::new(&mut self.io).poll_write(context, bytes)
        }

        fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_flush(context)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_shutdown(context)
        }
    }

    fn header_name(number: u8) -> HeaderName {
        HeaderName::try_from(format!("x-{number}")).expect("it is a name")
    }

    fn headers() -> impl Strategy<Value = Headers> {
        let short = "[a-z|~ ]{0,40}".prop_map(|text: String| text.trim().to_owned());
        let long = (1_usize..40_000, "[a-z|~]").prop_map(|(count, character): (usize, String)| character.repeat(count));
        prop::collection::vec((0_u8..20, prop_oneof![8 => short, 1 => long], any::<bool>()), 0..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, max_shrink_iters: 60, ..ProptestConfig::default() })]
        #[test]
        fn headers_of_any_size_in_pieces_of_any_size_arrive(
            requests in prop::collection::vec(headers(), 1..5),
            piece_bytes in prop_oneof![1 => 1_usize..100, 3 => 100_usize..70_000],
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime can be built");
            let received = runtime.block_on(filtered(&requests, piece_bytes));
            prop_assert_eq!(received.len(), requests.len());
            for (sent, received) in requests.iter().zip(&received) {
                prop_assert_eq!(&received["host"], "00000000000000000000000");
                prop_assert_eq!(received.len(), sent.len() + 1);
                for number in 0..20 {
                    let values = sent.iter().filter(|(name, ..)| *name == number).map(|(_, value, _)| value.as_bytes());
                    let got = received.get_all(header_name(number));
                    for (value, got) in values.zip(got) {
                        // A tilde takes 13 bits: the values replaced are those of more than 16 KiB as encoded.
                        let is_replaced = value.len() > 10_000 && got.as_bytes().iter().all(|byte| *byte == b'0');
                        prop_assert!(got.as_bytes() == value || is_replaced, "{} bytes", value.len());
                    }
                }
            }
        }
    }
}
