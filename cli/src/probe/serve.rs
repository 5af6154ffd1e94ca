//! `racksum probe serve`: the agent of a host.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use racksum_aggregator::bind_address;
use racksum_net::NetError;
use racksum_net::quic::Credentials;
use racksum_net::runtime::single_threaded;
use racksum_probe::{Agent, PORT};

use crate::args;
use crate::environment;
use crate::exit::{Failure, print_or_warn};
use crate::signals::{Ending, cannot_wait};

#[derive(Debug, clap::Args)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) struct Args {
    /// The address to serve on.
    #[arg(long, value_name = "IP", value_parser = bind_address)]
    #[arg(default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    bind: IpAddr,
    /// UDP port of the control server; 0 for a free one.
    #[arg(long, value_name = "PORT", default_value_t = PORT)]
    #[arg(value_parser = args::number::<u16>(0..=65534))]
    port: u16,
    /// UDP port of the measurements; 0 for a free one [default: the one after --port].
    #[arg(long, value_name = "PORT", value_parser = args::number::<u16>(0..=65535))]
    data_port: Option<u16>,
    /// Identity file with role aggregator; then only coordinators with an identity of role operator
    /// from the same authority are served [env: RACKSUM_IDENTITY].
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    identity: Option<PathBuf>,
    /// Serve beyond loopback without an identity: any host can then order measurements.
    #[arg(long)]
    insecure: bool,
}

/// Serves until a signal stops the agent.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let identity = environment::identity(args.identity.clone(), args.insecure)?;
    let credentials = Credentials::of_aggregator(identity.as_deref(), args.insecure)?;
    let cannot = |error: std::io::Error| Failure::of_host(cannot_wait(&error), &error);
    single_threaded().map_err(cannot)?.block_on(async {
        let mut signals = Ending::listen().map_err(cannot)?;
        let bind = SocketAddr::new(args.bind, args.port);
        let next = if args.port == 0 { 0 } else { args.port + 1 };
        let data_port = args.data_port.unwrap_or(next);
        let agent = Agent::open(bind, data_port, &credentials).map_err(|error| match error {
            NetError::PortTaken { addr } if addr.port() == data_port => {
                Failure::unavailable(format!(
                    "cannot bind {addr}: address in use; choose another port for measurements \
                     with --data-port, or stop the process that holds it"
                ))
            }
            error => error.into(),
        })?;
        let data = agent.data_addr().port();
        print_or_warn(&format!(
            "racksum probe on {}, measurements on UDP {data}",
            agent.addr().map_err(cannot)?
        ));
        tokio::select! {
            () = agent.run() => {
                return Err(Failure::failed("cannot receive measurements; see the log"));
            }
            _ = signals.next() => {}
        }
        print_or_warn("racksum probe stops");
        Ok(())
    })
}
