//! Exit codes, which scripts may rely on.

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::process::{ExitCode, ExitStatus, Termination};

use racksum_aggregator::{Options, StartError};
use racksum_net::NetError;
use racksum_net::file::{FileError, lacks_descriptor};
use racksum_net::local::CallError;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::Rank;
use racksum_proto::peer_text::PeerText;
use racksum_worker::{ConnectError, Error};
use serde::{Deserialize, Serialize};

use crate::{option_source, stderr};

/// The exit code of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Exit(u8);

impl Exit {
    /// The command succeeded.
    pub(crate) const OK: Self = Self(0);
    /// The work failed: a wrong sum, a lost rank, ranks that disagree, a timeout.
    pub(crate) const FAILED: Self = Self(1);
    /// The command line, the configuration or an input is wrong.
    pub(crate) const USAGE: Self = Self(2);
    /// The network, the aggregator or file descriptors are unavailable.
    pub(crate) const UNAVAILABLE: Self = Self(3);
    /// The reader of standard output has closed it. This is the code that a shell reports for
    /// SIGPIPE. No message is printed, because a reader such as `head` has all it needs.
    pub(crate) const UNREAD: Self = Self(128 + 13);

    /// Returns the exit code for this process after a rank's process has exited with `status`.
    pub(crate) fn of(status: ExitStatus) -> Self {
        let own = [Self::USAGE, Self::UNAVAILABLE];
        own.into_iter().find(|exit| status.code() == Some(exit.0.into())).unwrap_or(Self::FAILED)
    }
}

/// Prints a line on standard output and flushes it.
///
/// # Errors
/// If the write fails, for example because the reader has closed the pipe. In that case, `println!`
/// would panic.
pub(crate) fn print_line(line: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(stdout_failure)
}

/// Prints a line, or a warning if that fails. A server keeps running if its standard output is
/// closed or full.
pub(crate) fn print_or_warn(line: &str) {
    let printed = if stderr::has_room(io::stdout()) {
        // Escape the line: a path in it may contain control characters.
        print_line(&PeerText::of(line))
    } else {
        Err(stdout_failure(io::Error::other("its reader has stopped reading")))
    };
    if let Err(failure) = printed {
        stderr::warn(failure);
    }
}

/// Returns the failure for an error from writing to standard output.
pub(crate) fn stdout_failure(error: io::Error) -> Failure {
    let exit = if error.kind() == ErrorKind::BrokenPipe { Exit::UNREAD } else { Exit::FAILED };
    Failure { exit, ..Failure::failed(format!("cannot write to standard output: {error}")) }
}

impl Termination for Exit {
    fn report(self) -> ExitCode {
        ExitCode::from(self.0)
    }
}

/// The failure of a command: one sentence for the user, and the exit code.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) why: String,
    pub(crate) exit: Exit,
    /// The ranks whose loss stopped the work. Their own messages may name the cause.
    pub(crate) lost: Vec<u16>,
}

impl Failure {
    fn new(why: impl Into<String>, exit: Exit) -> Self {
        Self { why: why.into(), exit, lost: Vec::new() }
    }

    /// Records which ranks were lost.
    fn losing(self, ranks: &[Rank]) -> Self {
        Self { lost: ranks.iter().map(|rank| rank.0).collect(), ..self }
    }

    pub(crate) fn usage(why: impl Into<String>) -> Self {
        Self::new(why, Exit::USAGE)
    }

    pub(crate) fn failed(why: impl Into<String>) -> Self {
        Self::new(why, Exit::FAILED)
    }

    pub(crate) fn unavailable(why: impl Into<String>) -> Self {
        Self::new(why, Exit::UNAVAILABLE)
    }
}

impl Failure {
    /// Returns the failure for a path that could not be used. The exit code is `USAGE` if the path
    /// itself is wrong. Any other error, such as a full disk, is treated as an error of the host.
    pub(crate) fn of_path(why: impl Into<String>, error: &io::Error) -> Self {
        // `ErrorKind` has no stable kind for ELOOP (too many symbolic links).
        let is_wrong = matches!(
            error.kind(),
            ErrorKind::NotFound
                | ErrorKind::AlreadyExists
                | ErrorKind::PermissionDenied
                | ErrorKind::ReadOnlyFilesystem
                | ErrorKind::NotADirectory
                | ErrorKind::IsADirectory
                | ErrorKind::InvalidFilename
                | ErrorKind::InvalidInput
        ) || error.raw_os_error() == Some(ELOOP);
        if is_wrong { Self::usage(why) } else { Self::of_host(why, error) }
    }

    /// Returns the failure for an error of the host. The exit code is `UNAVAILABLE` if file
    /// descriptors are exhausted, because some may be free later.
    pub(crate) fn of_host(why: impl Into<String>, error: &io::Error) -> Self {
        if lacks_descriptor(error) { Self::unavailable(why) } else { Self::failed(why) }
    }

    /// Returns the failure for a file that could not be read. The exit code is `UNAVAILABLE` if
    /// file descriptors are exhausted. Otherwise it is `USAGE`, because the user named the file.
    pub(crate) fn of_file(why: impl Into<String>, error: &FileError) -> Self {
        match error {
            FileError::Io(error) if lacks_descriptor(error) => Self::unavailable(why),
            _ => Self::usage(why),
        }
    }

    /// Returns the failure for a socket path that could not be bound. The exit code is
    /// `UNAVAILABLE` if another process serves there, and otherwise that of [`Self::of_path`].
    pub(crate) fn of_serving(why: impl Into<String>, error: &io::Error) -> Self {
        match error.kind() {
            ErrorKind::AddrInUse => Self::unavailable(why),
            _ => Self::of_path(why, error),
        }
    }

    /// Returns the failure for a failed call to a socket path. The exit code is `USAGE` if no
    /// socket can have this path or if the path names a file that is not a socket. Otherwise it is
    /// `UNAVAILABLE`, because a server may start there later.
    pub(crate) fn of_call(why: impl Into<String>, error: &CallError) -> Self {
        use ErrorKind::{InvalidFilename, InvalidInput};
        match error {
            CallError::NoSocket => Self::usage(why),
            CallError::Io(error) if matches!(error.kind(), InvalidInput | InvalidFilename) => {
                Self::usage(why)
            }
            _ => Self::unavailable(why),
        }
    }
}

/// The Linux error number for too many symbolic links.
const ELOOP: i32 = 40;

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

/// Rewrites the option names in a library's message as flags of this command line.
///
/// The libraries write an option as `name` in backticks, because the Python package takes the same
/// options as keyword arguments. Do not pass a message about the contents of a file, in which a
/// name in backticks may be a key of the file.
pub(crate) fn with_flags(why: impl fmt::Display) -> String {
    let flag = |name: &str| format!("--{}", name.replace('_', "-"));
    let why = why.to_string();
    OPTIONS.iter().fold(why, |why, name| why.replace(&format!("`{name}`"), &flag(name)))
}

/// Option names that appear in the libraries' messages.
const OPTIONS: [&str; 9] = [
    "data_auth",
    "generation",
    "identity",
    "insecure",
    "job",
    "mtu",
    "on_rank_loss",
    "rank",
    "wait",
];

impl From<NetError> for Failure {
    fn from(error: NetError) -> Self {
        let why = option_source::with_variable(error.options(), with_flags(&error));
        match error.is_usage() {
            true => Self::usage(why),
            false => Self::unavailable(why),
        }
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        Self::of_start(&error, &Options::USUAL)
    }
}

impl Failure {
    /// Returns the failure for an aggregator that did not start. The message calls the options by
    /// the names in `options`.
    pub(crate) fn of_start(error: &StartError, options: &Options) -> Self {
        let why = with_flags(error.message_with_options(options));
        let why = match error {
            StartError::Net(error) => option_source::with_variable(error.options(), why),
            _ => why,
        };
        match error {
            StartError::StatusSocket { cause, .. } => Self::of_serving(why, cause),
            StartError::Config(_)
            | StartError::Parent(_)
            | StartError::Memory { .. }
            | StartError::NoMulticast(_) => Self::usage(why),
            StartError::Net(error) if error.is_usage() => Self::usage(why),
            _ => Self::unavailable(why),
        }
    }
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        let why = option_source::with_variable(error.options(), with_flags(&error));
        match error {
            error if error.is_usage() => Self::usage(why),
            ConnectError::PeerLost { ranks, .. } => Self::failed(why).losing(&ranks),
            ConnectError::Incomplete { .. } => Self::failed(why),
            _ => Self::unavailable(why),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match &error {
            Error::Op(OpError::PeerLost { ranks, .. })
            | Error::Submit(SubmitError::PeerLost { ranks, .. }) => {
                Self::failed(with_flags(&error)).losing(ranks)
            }
            Error::Op(_) | Error::Submit(SubmitError::Ended { .. } | SubmitError::OpsExhausted) => {
                Self::failed(with_flags(error))
            }
            _ => Self::usage(with_flags(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use racksum_proto::loss::Loss;

    use super::*;
    use crate::args::EXIT_CODES;

    #[test]
    fn document_and_help_say_the_same_of_exit_codes() {
        let document = include_str!("../../docs/operating.md");
        for line in EXIT_CODES.lines().skip(1) {
            let (code, means) = line.trim().split_once("  ").unwrap();
            assert!(
                document.contains(&format!("| {code} | {means} |\n")),
                "docs/operating.md lacks {line:?}"
            );
        }
    }

    #[test]
    fn why_a_job_is_not_joined_says_whose_fault_it_is() {
        let (host, why) = ("agg:7177".to_owned(), "it is unknown".to_owned());
        let lost = ConnectError::PeerLost { ranks: vec![Rank(1)], why: Loss::Died };
        let late = std::time::Duration::from_secs(1);
        let (missing, elsewhere) = (vec![1], String::new());
        let no_room =
            ConnectError::NoRoom { why: why.clone(), waited: late, elsewhere: elsewhere.clone() };
        for (error, exit) in [
            (ConnectError::NoAddress { host: host.clone(), why: why.clone() }, Exit::USAGE),
            (NetError::InsecureIdentity.into(), Exit::USAGE),
            (ConnectError::Unresolved { host, why: why.clone() }, Exit::UNAVAILABLE),
            (ConnectError::Refused(why), Exit::UNAVAILABLE),
            (ConnectError::Draining, Exit::UNAVAILABLE),
            // `NoRoom` is a refusal, even after a wait.
            (no_room, Exit::UNAVAILABLE),
            (lost, Exit::FAILED),
            (ConnectError::Incomplete { missing, waited: late, elsewhere }, Exit::FAILED),
        ] {
            let failure = Failure::from(error);
            assert!(failure.exit == exit, "{failure:?}");
        }
    }

    #[test]
    fn a_path_that_cannot_be_is_wrong_and_a_full_disk_is_not() {
        // ENOENT, EACCES, EEXIST, ENOTDIR, EISDIR, EINVAL, EROFS, ENAMETOOLONG and ELOOP.
        for wrong in [2, 13, 17, 20, 21, 22, 30, 36, 40] {
            let error = io::Error::from_raw_os_error(wrong);
            assert_eq!(Failure::of_path("", &error).exit, Exit::USAGE, "{error}");
        }
        // ENFILE and EMFILE.
        for later in [23, 24] {
            let error = io::Error::from_raw_os_error(later);
            assert_eq!(Failure::of_path("", &error).exit, Exit::UNAVAILABLE, "{error}");
            assert_eq!(Failure::of_file("", &error.into()).exit, Exit::UNAVAILABLE, "{later}");
        }
        // EIO and ENOSPC.
        for failed in [5, 28] {
            let error = io::Error::from_raw_os_error(failed);
            assert_eq!(Failure::of_path("", &error).exit, Exit::FAILED, "{error}");
        }
    }

    #[test]
    fn a_socket_in_use_or_not_served_yet_may_do_later_and_another_file_never_will() {
        let of = |kind: ErrorKind| {
            let (path, cause) = ("socket".into(), kind.into());
            let bound = Failure::from(StartError::StatusSocket { path, cause });
            let served = Failure::of_serving("", &kind.into());
            assert!(bound.exit == served.exit, "{bound:?} {served:?}");
            bound.exit
        };
        assert_eq!(of(ErrorKind::AddrInUse), Exit::UNAVAILABLE);
        assert_eq!(of(ErrorKind::AlreadyExists), Exit::USAGE);
        let call = |error: CallError| Failure::of_call("", &error).exit;
        assert_eq!(call(CallError::NoSocket), Exit::USAGE);
        assert_eq!(call(io::Error::from(ErrorKind::NotFound).into()), Exit::UNAVAILABLE);
        assert_eq!(call(io::Error::from(ErrorKind::InvalidFilename).into()), Exit::USAGE);
    }

    #[test]
    fn a_message_of_a_library_names_flags() {
        let why = "it is running; choose another `job`, or `on_rank_loss` continue; see `racksum`";
        let expected =
            "it is running; choose another --job, or --on-rank-loss continue; see `racksum`";
        let failure = Failure::from(ConnectError::Refused(why.into()));
        assert_eq!(failure.to_string(), format!("the aggregator refused: {expected}"));
        assert_eq!(Failure::usage("unknown key `job`").to_string(), "unknown key `job`");
    }

    #[test]
    fn commands_that_join_have_the_flag_that_errors_about_the_path_name() {
        let why = "MTU 9000 exceeds 1500; lower `mtu`".into();
        let failure = Failure::from(ConnectError::Arguments { options: &["mtu"], why });
        assert_eq!(failure.to_string(), "MTU 9000 exceeds 1500; lower --mtu");
        let command = crate::Cli::command();
        for name in ["bench", "reduce", "worker"] {
            let joins = command.find_subcommand(name).unwrap();
            assert!(joins.get_arguments().any(|flag| flag.get_long() == Some("mtu")), "{name}");
        }
    }

    #[test]
    fn a_failure_knows_the_ranks_that_were_lost() {
        let (ranks, why) = (vec![Rank(3), Rank(5)], Loss::Left);
        for failure in [
            Failure::from(ConnectError::PeerLost { ranks: ranks.clone(), why }),
            Failure::from(Error::Op(OpError::PeerLost { ranks: ranks.clone(), why })),
            Failure::from(Error::Submit(SubmitError::PeerLost { ranks: ranks.clone(), why })),
        ] {
            assert_eq!((&failure.lost[..], failure.exit), (&[3, 5][..], Exit::FAILED));
        }
        assert!(Failure::from(ConnectError::Draining).lost.is_empty());
    }

    #[test]
    fn a_session_that_ended_between_two_ops_is_no_wrong_command_line() {
        let why = "the aggregator A:7177 is gone";
        let failure = Failure::from(Error::Submit(SubmitError::Ended { why: why.into() }));
        assert_eq!(failure.to_string(), "the session ended: the aggregator A:7177 is gone");
        assert!(failure.exit == Exit::FAILED, "{failure:?}");
    }
}
