//! `racksum move` and `racksum drain`: move running jobs to aggregators that their ranks need not
//! know.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use racksum_net::quic::ask_to_move;
use racksum_proto::control::{CONTROL_VERSION, FromWorker};
use racksum_proto::counted::counted;
use racksum_proto::job_name::JobName;
use racksum_proto::move_target::MoveTarget;
use racksum_proto::status::AggregatorStatus;
use racksum_proto::time::Span;
use racksum_worker::{addresses, aggregator_sets, check_address};

use crate::args;
use crate::exit::{Failure, print_line};
use crate::remote::Call;
use crate::status;

#[derive(Debug, clap::Args)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) struct MoveArgs {
    /// The job to move, with all its groups.
    job: String,
    #[command(flatten)]
    request: Request,
}

#[derive(Debug, clap::Args)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    request: Request,
}

#[derive(Debug, clap::Args)]
struct Request {
    /// The aggregator to move to, as HOST:PORT; A+B spreads the job over two. The ranks connect to
    /// it by this name.
    #[arg(long, value_name = "HOST:PORT", value_parser = target)]
    to: MoveTarget,
    /// The aggregator that serves now, as HOST:PORT or as the path of its status socket [default:
    /// the aggregator of this user on this host; `move` chooses the one that serves JOB].
    #[arg(long, value_name = "WHICH")]
    from: Option<String>,
    /// Identity file with role operator, which moving jobs requires if the aggregator has
    /// identities [env: RACKSUM_IDENTITY].
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    identity: Option<PathBuf>,
    /// Connect beyond loopback without an identity [env: RACKSUM_INSECURE].
    #[arg(long)]
    insecure: bool,
}

/// Parses the aggregators to move to: one set of a job's `--aggregator`.
fn target(text: &str) -> Result<MoveTarget, String> {
    let mut sets = aggregator_sets(text)?.into_iter();
    let (Some(hosts), None) = (sets.next(), sets.next()) else {
        return Err(
            "a job moves to one aggregator, or to several as A+B; leave out the comma".into()
        );
    };
    hosts.iter().try_for_each(|host| check_address(host)).map_err(|error| error.to_string())?;
    let to = MoveTarget { hosts };
    to.check().map(|()| to)
}

/// Time limit for the answer to a request. If the aggregator dies, the wait ends sooner.
const LIMIT: Span = Span::from_secs(600);

/// Runs `racksum move`.
pub(crate) fn run_move(args: &MoveArgs) -> Result<(), Failure> {
    let MoveArgs { job, request } = args;
    let name = JobName::from(&**job);
    let moved = request.move_job(job)?;
    let groups = if moved > 1 { format!(", {moved} groups") } else { String::new() };
    print_line(&format!("job {name:?} runs at {}{groups}", request.to))
}

/// Runs `racksum drain`.
pub(crate) fn run_drain(args: &DrainArgs) -> Result<(), Failure> {
    let request = &args.request;
    let drain = |to| FromWorker::DrainTo { version: CONTROL_VERSION, to };
    let moved = request.send("drain", None, drain)?;
    print_line(&format!("{} moved to {}; the aggregator stops", counted(moved, "job"), request.to))
}

/// Moves a job, with all its groups, from one of its aggregators to others.
pub(crate) fn move_job(
    job: &str,
    from: String,
    to: &[String],
    (identity, insecure): (Option<PathBuf>, bool),
) -> Result<(), Failure> {
    let to = target(&to.join("+")).map_err(Failure::usage)?;
    Request { to, from: Some(from), identity, insecure }.move_job(job).map(drop)
}

impl Request {
    /// Moves a job. Returns the number of its groups.
    fn move_job(&self, job: &str) -> Result<u16, Failure> {
        let name = JobName::from(job);
        name.check().map_err(Failure::usage)?;
        self.send("move jobs at", Some(job), |to| FromWorker::MoveJob {
            version: CONTROL_VERSION,
            job: name.clone(),
            to,
        })
    }

    /// Sends a request to the aggregator that serves now. Returns the number of moved jobs.
    fn send(
        &self,
        verb: &str,
        job: Option<&str>,
        request: impl Fn(MoveTarget) -> FromWorker,
    ) -> Result<u16, Failure> {
        let (name, addrs) = self.find(job)?;
        let (identity, insecure) = (self.identity.clone(), self.insecure);
        Call { verb, name: &name, addrs, identity, insecure }
            .ask(async |to, caller| ask_to_move(to, request(self.to.clone()), caller, LIMIT).await)
    }

    /// Returns the name and the addresses of the aggregator that serves now.
    fn find(&self, job: Option<&str>) -> Result<(String, Vec<SocketAddr>), Failure> {
        let status = match &self.from {
            Some(from) if status::is_path(from) => status::ask_socket(Path::new(from))?,
            Some(from) => return Ok((from.clone(), addresses(from)?)),
            None => local(job)?,
        };
        let addr = reachable(&status)?;
        Ok((addr.to_string(), vec![addr]))
    }
}

/// Returns the status of the aggregator of this user on this host that serves a job.
fn local(job: Option<&str>) -> Result<AggregatorStatus, Failure> {
    let mut all = status::ask_local()?;
    let total = all.len();
    if let Some(job) = job {
        all.retain(|status| status.jobs.iter().any(|it| it.job == job));
    }
    let advice = "name the aggregator with --from";
    match (&all[..], job) {
        // Every aggregator of a job that is spread over several can move it.
        ([_, ..], Some(_)) | ([_], None) => Ok(all.swap_remove(0)),
        ([], _) if total == 0 => Err(Failure::unavailable(format!(
            "no aggregator of this user answers on this host; {advice}"
        ))),
        ([], job) => Err(Failure::unavailable(format!(
            "no aggregator of this user on this host serves job {:?}; {advice}",
            job.unwrap_or_default()
        ))),
        (several, None) => {
            let addrs: Vec<_> = several.iter().map(|status| &*status.addr).collect();
            Err(Failure::usage(format!(
                "several aggregators of this user run on this host: {}; {advice}",
                addrs.join(", ")
            )))
        }
    }
}

/// Returns the address at which an aggregator on this host is called.
fn reachable(status: &AggregatorStatus) -> Result<SocketAddr, Failure> {
    let addr: SocketAddr = status.addr.parse().map_err(|_| {
        Failure::unavailable(format!("the aggregator gives no address but {:?}", status.addr))
    })?;
    let ip = match addr.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    Ok(SocketAddr::new(ip, addr.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_moves_to_one_set_of_aggregators() {
        let hosts = |text| target(text).map(|to| to.hosts);
        assert_eq!(hosts("a:1"), Ok(vec!["a:1".into()]));
        assert_eq!(hosts("a:1+b:2"), Ok(vec!["a:1".into(), "b:2".into()]));
        for (wrong, why) in [
            ("a:1,b:2", "leave out the comma"),
            ("a:1+a:1", "listed twice"),
            ("a", "the port is missing"),
            ("unix:/sidecar", ""),
            ("", "is empty"),
        ] {
            let error = hosts(wrong).unwrap_err();
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }
}
