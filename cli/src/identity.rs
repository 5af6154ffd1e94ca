//! `racksum identity`: a small certificate authority for a cluster, and the identities that it
//! issues.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::ops::RangeInclusive;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::{Subcommand, ValueEnum};
use racksum_net::quic::{Authority, Certificate, Role, Subject};
use racksum_proto::peer_text::PeerText;
use serde_json::json;

use crate::args::{self, Format};
use crate::exit::{Failure, print_line};
use crate::stderr;
use crate::unnamed::{Unnamed, beside, folder_of, link, random, unnamed};

#[derive(Debug, clap::Args)]
#[command(after_long_help = format!("{HELP}\n\n{}", args::EXIT_CODES))]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

/// Text of `--help` after the flags.
const HELP: &str = "\
An authority issues the identities of a cluster. Each node has an identity file: its certificate,
its key, and the authority's certificate, which verifies the other nodes. Keep the authority's own
file only where identities are issued.

Examples:
  racksum identity init                          writes authority.pem
  racksum identity issue agg-1 --role aggregator writes agg-1.pem, for the aggregator's host
  racksum identity issue node-7                  writes node-7.pem, for a worker's host
  racksum identity issue ops --role operator     writes ops.pem, to move jobs and to measure
  racksum identity show node-7.pem               shows its name, role and expiry

  racksum aggregator --bind 10.0.0.1 --identity agg-1.pem
  racksum bench --aggregator 10.0.0.1:7177 --identity node-7.pem --rank 0 --world 2";

#[derive(Debug, Subcommand)]
enum Command {
    /// Create an authority.
    Init {
        /// Name of the authority, as its certificates show it.
        #[arg(long, default_value = "racksum")]
        name: String,
        /// Number of days until the authority expires.
        #[arg(long, default_value_t = 3650, value_parser = args::number::<u32>(DAYS))]
        days: u32,
        /// File to write, which must not exist yet.
        #[arg(long, value_name = "FILE", default_value = "authority.pem")]
        out: PathBuf,
    },
    /// Issue an identity.
    Issue {
        /// Name of the node, which [[admit]] rules match: letters, digits, dots, underscores,
        /// dashes.
        name: String,
        /// Role of the node.
        #[arg(long, value_enum, ignore_case = true, default_value_t = NodeRole::Worker)]
        role: NodeRole,
        /// Number of days until the identity expires; it must not outlive its authority [default:
        /// 365, or fewer if the authority expires earlier].
        #[arg(long, value_parser = args::number::<u32>(DAYS))]
        days: Option<u32>,
        /// File of the authority.
        #[arg(long, value_name = "FILE", default_value = "authority.pem")]
        authority: PathBuf,
        /// File to write, which must not exist yet [default: NAME.pem].
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Show the contents of certificates.
    Show {
        /// Files of identities or authorities.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// Output format.
        #[arg(long, value_enum, ignore_case = true, default_value_t = Format::Text)]
        format: Format,
    },
}

/// Role of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum NodeRole {
    /// Joins jobs.
    Worker,
    /// Serves jobs or measurements, and may join jobs for other ranks.
    Aggregator,
    /// Moves jobs, drains aggregators, and orders measurements.
    Operator,
}

impl From<NodeRole> for Role {
    fn from(role: NodeRole) -> Self {
        match role {
            NodeRole::Worker => Self::Worker,
            NodeRole::Aggregator => Self::Aggregator,
            NodeRole::Operator => Self::Operator,
        }
    }
}

/// Range of a certificate's validity in days, up to about a century.
const DAYS: RangeInclusive<u64> = 1..=36_500;

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.command {
        Command::Init { name, days, out } => {
            write_secret(out, &Authority::create(name, *days)?)?;
            print_line(&format!(
                "wrote {}, the authority {name:?}; anyone who has the file can issue identities, \
                 so keep it off the nodes",
                out.display()
            ))
        }
        Command::Issue { name, role, days, authority, out } => {
            let authority = Authority::load(authority)?;
            let role = Role::from(*role);
            let (pem, not_after) = authority.issue(&Subject { name, role, days: *days })?;
            let out = out.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.pem")));
            write_secret(&out, &pem)?;
            print_line(&format!(
                "wrote {}, the identity of {role} {name:?}, valid until {not_after}",
                out.display()
            ))
        }
        Command::Show { files, format } => show(files, *format),
    }
}

/// Prints the certificates of each file. If a file cannot be shown, continues with the next one.
/// Returns the last error, and prints the earlier ones.
fn show(files: &[PathBuf], format: Format) -> Result<(), Failure> {
    let mut failed: Option<Failure> = None;
    for path in files {
        match Certificate::all_of(path) {
            Ok(certificates) => show_all(path, certificates, format)?,
            Err(error) => {
                if let Some(before) = failed.replace(error.into()) {
                    stderr::print_line(&before);
                }
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Prints the fields of a file's certificates.
fn show_all(path: &Path, certificates: Vec<Certificate>, format: Format) -> Result<(), Failure> {
    for certificate in certificates {
        let Certificate { name, role, issuer, not_before, not_after, valid, fingerprint, .. } =
            certificate;
        let file = path.display().to_string();
        print_line(&match format {
            Format::Json => json!({
                "file": file,
                "name": name,
                "role": role.name(),
                "issuer": issuer,
                "not_before": not_before,
                "not_after": not_after,
                "valid": valid,
                "sha256": fingerprint,
            })
            .to_string(),
            Format::Text => {
                let state = if valid { "" } else { "  NOT VALID NOW" };
                format!(
                    "{}: {role} {name:?} of {issuer:?}, {not_before} to {not_after}{state}\n  \
                     sha256 {fingerprint}",
                    PeerText::of(&file)
                )
            }
        })?;
    }
    Ok(())
}

/// Writes a file that only its owner may read. The file appears complete or not at all, and
/// replaces no other file.
fn write_secret(path: &Path, contents: &str) -> Result<(), Failure> {
    write_secret_by(path, contents, unnamed)
}

/// Writes the file as `write_secret` does, and uses `unnamed` to create the unnamed file.
fn write_secret_by(path: &Path, contents: &str, unnamed: Unnamed) -> Result<(), Failure> {
    let path_shown = path.display();
    let failed = |error: io::Error| {
        let why = format!("cannot write {path_shown}: {error}; choose another --out");
        Failure::of_path(why, &error)
    };
    let cannot = |error: io::Error| match error.kind() {
        ErrorKind::AlreadyExists => Failure::usage(format!(
            "{path_shown} already exists, and racksum never overwrites a key; choose another \
             --out, or remove the file"
        )),
        _ => failed(error),
    };
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    let write =
        |mut file: &File| file.write_all(contents.as_bytes()).and_then(|()| file.sync_all());
    // Unlike rename(2), link(2) never replaces an existing file.
    if let Some(file) = unnamed(folder_of(path), options.clone()) {
        return write(&file).and_then(|()| link(&file, path)).map_err(cannot);
    }
    options.create_new(true);
    let (hidden, file) = beside(path, random, |hidden| options.open(hidden)).map_err(failed)?;
    let written = write(&file).and_then(|()| fs::hard_link(&hidden, path));
    // Remove only the temporary name: after a successful `hard_link`, the file keeps its final one.
    drop(fs::remove_file(&hidden));
    written.map_err(cannot)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_is_its_owner_s_alone_and_never_written_over_another() {
        let folder = std::env::temp_dir().join(format!("racksum-secret-{}", std::process::id()));
        // Test unnamed files, where this file system supports them, and temporary names.
        let ways: [Unnamed; 2] = [unnamed, |_, _| None];
        for unnamed in ways {
            fs::create_dir_all(&folder).unwrap();
            let path = folder.join("node.pem");
            write_secret_by(&path, "first", unnamed).unwrap();
            let why = write_secret_by(&path, "second", unnamed).unwrap_err().to_string();
            assert!(why.contains("already exists"), "{why}");
            assert_eq!(fs::read(&path).unwrap(), b"first");
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
            assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
            fs::remove_dir_all(&folder).unwrap();
        }
    }
}
