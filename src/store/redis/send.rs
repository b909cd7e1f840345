//! One command over one connection, and what its reply asks for.

use fred::clients::Client;
use fred::interfaces::ClientLike;
use fred::types::{ClusterHash, CustomCommand, Value};

use super::connect;
use super::failure::Refused;

/// Sends one command, and keeps the text of an error, shortened.
pub(super) async fn send_and_tell(
    client: &Client,
    command: &'static str,
    args: Vec<Value>,
) -> Result<Value, (Refused, String)> {
    let named = CustomCommand::new_static(command, ClusterHash::FirstKey, false);
    client.custom(named, args).await.map_err(|error| (Refused::from_error(&error), connect::in_words(error.details())))
}

/// Sends one command.
pub(super) async fn send(
    client: &Client,
    command: &'static str,
    args: Vec<Value>,
    asking: bool,
) -> Result<Value, Refused> {
    let named = |name| CustomCommand::new_static(name, ClusterHash::FirstKey, false);
    if !asking {
        return client.custom(named(command), args).await.map_err(|error| Refused::from_error(&error));
    }
    let pipeline = client.pipeline();
    let queued = async {
        let _: Value = pipeline.custom(named("ASKING"), Vec::<Value>::new()).await?;
        let _: Value = pipeline.custom(named(command), args).await?;
        Ok(())
    };
    queued.await.map_err(|error| Refused::from_error(&error))?;
    let last = pipeline.try_all::<Value>().await.pop();
    last.unwrap_or(Ok(Value::Null)).map_err(|error| Refused::from_error(&error))
}
