//! The aggregator of a run on this host. The aggregator and the ranks of the run accept only each
//! other, because any user of the host could otherwise join the job or pose as the aggregator.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use racksum_aggregator::{Aggregator, Config, Options, StartError};
use racksum_net::interface::{Interface, interfaces};
use racksum_net::quic::{Authority, Role, Subject};
use racksum_net::with_limit;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::exit::Failure;
use crate::stderr;
use crate::unnamed::open_at;

/// An aggregator in this process, and the identity file of its ranks. The authority that issues
/// both identities is discarded, so nobody else can obtain one.
#[derive(Debug)]
pub(crate) struct Embedded {
    aggregator: Aggregator,
    /// The identity file of the ranks: a file in memory, which their processes inherit.
    ranks: File,
}

impl Embedded {
    /// Starts the aggregator with an identity of its own.
    pub(crate) fn start(config: Config) -> Result<Self, Failure> {
        // Without this check, ranks would try to connect over loopback until they time out.
        if interfaces().is_ok_and(|all| is_loopback_down(&all)) {
            return Err(Failure::unavailable(
                "a run of all ranks on this host needs the loopback interface, which is down; run \
                 `ip link set lo up`",
            ));
        }
        let authority = Authority::throwaway("racksum", DAYS)?;
        let of_ranks = in_memory(&issue(&authority, Role::Worker)?)?;
        fcntl_setfd(&of_ranks, FdFlags::empty()).map_err(|error| cannot(&error.into()))?;
        if !open_at("self", &of_ranks).exists() {
            return Err(Failure::unavailable(
                "a run of all ranks on this host needs /proc, which is not mounted; run `mount -t \
                 proc proc /proc`",
            ));
        }
        let own = in_memory(&issue(&authority, Role::Aggregator)?)?;
        let shards = config.shards;
        let config = Config { identity: Some(open_at("self", &own)), ..config };
        let aggregator = Aggregator::start(config).map_err(|error| of_own(&error, shards))?;
        for warning in aggregator.warnings() {
            stderr::warn(warning);
        }
        Ok(Self { aggregator, ranks: of_ranks })
    }

    /// Adds to a rank's command the flags for its number, world and connection.
    pub(crate) fn call(&self, command: &mut Command, rank: u16, world: u16) {
        command
            .args(["--aggregator", &self.aggregator.addr().to_string()])
            .arg("--identity")
            .arg(open_at("self", &self.ranks))
            .args(["--rank", &rank.to_string(), "--world", &world.to_string()]);
    }
}

/// Returns whether this host has loopback interfaces, but all of them are down.
fn is_loopback_down(interfaces: &[Interface]) -> bool {
    let mut loopback = interfaces.iter().filter(|interface| interface.is_loopback).peekable();
    loopback.peek().is_some() && !loopback.any(|interface| interface.is_up)
}

/// Issues an identity in PEM format.
fn issue(authority: &Authority, role: Role) -> Result<String, Failure> {
    let (pem, _) = authority.issue(&Subject { name: role.name(), role, days: None })?;
    Ok(pem)
}

/// Writes a secret to a file in memory that only this user may read. The file disappears when the
/// last process that has it open ends, even if that process crashes.
fn in_memory(secret: &str) -> Result<File, Failure> {
    let write = || -> io::Result<File> {
        let mut file = File::from(memfd_create("racksum-identity", MemfdFlags::CLOEXEC)?);
        // By default, a file in memory has permissions for all users.
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.write_all(secret.as_bytes())?;
        Ok(file)
    };
    write().map_err(|error| cannot(&error))
}

/// Returns the failure to report when an identity of this run cannot be stored.
fn cannot(error: &io::Error) -> Failure {
    let why = with_limit(error);
    let why = format!("cannot keep this run's temporary identity file in memory: {why}");
    Failure::of_host(why, error)
}

/// Returns the failure for an embedded aggregator that did not start. The message names only flags
/// that the commands with an embedded aggregator have.
fn of_own(error: &StartError, shards: u8) -> Failure {
    // These commands have no `--pool-mib`, so only a lower `--shards` can save memory.
    let memory: &[_] = if shards == 1 { &[] } else { &["--shards"] };
    Failure::of_start(error, &Options { memory, ..Options::USUAL })
}

/// Validity of the identities in days, longer than any run.
const DAYS: u32 = 365;

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::io::Read;
    use std::os::unix::fs::MetadataExt;
    use std::process::Stdio;

    use racksum_worker::{Client, ConnectOptions};

    use super::*;

    fn start() -> Embedded {
        Embedded::start(Config { port: 0, pool_mib: 16, ..Config::default() }).unwrap()
    }

    #[test]
    fn a_stranger_does_not_join_a_run_on_this_host() {
        let embedded = start();
        let join = |identity| {
            let addr = embedded.aggregator.addr().to_string();
            let options = ConnectOptions { identity, ..ConnectOptions::new(addr, "reduce") };
            Client::connect(&options).map(drop)
        };
        join(Some(open_at("self", &embedded.ranks))).unwrap();
        let why = join(None).unwrap_err().to_string();
        assert!(why.contains("identity"), "{why}");
    }

    #[test]
    fn ranks_inherit_their_identity_which_no_other_user_may_read() {
        let embedded = start();
        let mut command = Command::new("cat");
        embedded.call(&mut command, 1, 2);
        let given = command.get_args().collect::<Vec<_>>();
        let named = given.iter().position(|arg| *arg == "--identity").unwrap();
        let path: &OsStr = given[named + 1];
        assert_eq!(std::fs::metadata(path).unwrap().mode() & 0o777, 0o600);
        let mut cat = Command::new("cat").arg(path).stdout(Stdio::piped()).spawn().unwrap();
        let mut read = String::new();
        cat.stdout.take().unwrap().read_to_string(&mut read).unwrap();
        assert!(cat.wait().unwrap().success());
        assert_eq!(read, std::fs::read_to_string(path).unwrap());
        assert!(read.contains("PRIVATE KEY"));
    }

    #[test]
    fn an_aggregator_of_this_host_is_told_of_by_flags_that_there_are() {
        let none = of_own(&StartError::Memory { mib: 1024 }, 2).to_string();
        let config = Config { shards: 2, pool_mib: 1 << 20, ..Config::default() };
        let too_large = of_own(&Aggregator::start(config).unwrap_err(), 2).to_string();
        for why in [none, too_large] {
            assert!(why.contains("; lower --shards"), "{why}");
            assert!(!why.contains("--pool-mib"), "{why}");
        }
        let one = of_own(&StartError::Memory { mib: 1024 }, 1).to_string();
        assert!(one.contains("; raise the limit on") && !one.contains("--shards"), "{one}");
    }
}
