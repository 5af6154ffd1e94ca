//! The status of an aggregator that is queried at its network address, possibly on another host.

use racksum_net::quic::ask_status;
use racksum_proto::status::AggregatorStatus;
use racksum_worker::{ConnectError, addresses};

use std::path::Path;

use super::parse;
use crate::exit::Failure;
use crate::remote::Call;

/// Resolves `HOST:PORT`, and queries the addresses in turn until an aggregator answers.
pub(super) fn ask(
    name: &str,
    identity: Option<&Path>,
    insecure: bool,
) -> Result<AggregatorStatus, Failure> {
    let addrs = addresses(name).map_err(|error| match error {
        no_address @ ConnectError::NoAddress { .. } => Failure::usage(format!(
            "{no_address}; it is not the path of a status socket either; for a sidecar, pass \
             unix:PATH"
        )),
        other => other.into(),
    })?;
    let identity = identity.map(Path::to_owned);
    let call = Call { verb: "query", name, addrs, identity, insecure };
    let json = call.ask(async |to, caller| ask_status(to, caller).await)?;
    parse(json.as_bytes())
        .map_err(|why| Failure::unavailable(format!("cannot query {name}: {why}")))
}
