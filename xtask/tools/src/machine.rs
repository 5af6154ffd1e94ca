//! Requirements of the tests and the benches: programs on this machine, and the right to create
//! network namespaces.
//!
//! Tests and benches that lack a requirement skip themselves, with one line of output and no
//! failure.

use std::env;
use std::path::Path;

use anyhow::Result;

use crate::shell::Cmd;

/// Provides the tools for links with rates and losses, or returns the reason why they are
/// unavailable.
///
/// # Errors
/// Returns an error if an installation fails.
pub fn link_tools(root: &Path) -> Result<Option<String>> {
    if let Some(why) = provide(root, &["ip", "tc", "iptables"], &["iproute2", "iptables"])? {
        return Ok(Some(why));
    }
    if Cmd::new("unshare", &["--net", "true"]).succeeds(root) {
        return Ok(None);
    }
    let why = if is_root(root) {
        "root cannot create network namespaces here"
    } else {
        "only root can create network namespaces"
    };
    Ok(Some(why.to_owned()))
}

/// Installs `packages` if one of `tools` is missing. Returns the reason if it cannot install them.
///
/// # Errors
/// Returns an error if an installation fails.
pub fn provide(root: &Path, tools: &[&str], packages: &[&str]) -> Result<Option<String>> {
    let missing = tools.iter().copied().filter(|tool| !on_path(tool)).collect();
    match plan(missing, is_root(root), on_path("apt-get")) {
        Plan::Nothing => Ok(None),
        Plan::Skip(why) => Ok(Some(why)),
        Plan::Install => {
            Cmd::new("apt-get", &["update", "-q"]).run(root)?;
            let install = ["install", "-q", "-y", "--no-install-recommends"];
            Cmd::new("apt-get", &[&install[..], packages].concat())
                .env("DEBIAN_FRONTEND", "noninteractive")
                .run(root)?;
            Ok(None)
        }
    }
}

fn is_root(root: &Path) -> bool {
    Cmd::new("sh", &["-c", "test \"$(id -u)\" = 0"]).succeeds(root)
}

/// The action for missing programs.
#[derive(Debug, PartialEq, Eq)]
enum Plan {
    Nothing,
    Install,
    Skip(String),
}

fn plan(missing: Vec<&str>, is_root: bool, has_apt: bool) -> Plan {
    if missing.is_empty() {
        return Plan::Nothing;
    }
    let missing = missing.join(" and ");
    match (is_root, has_apt) {
        (true, true) => Plan::Install,
        (true, false) => {
            Plan::Skip(format!("{missing} not found, and there is no apt-get to install packages"))
        }
        (false, _) => {
            Plan::Skip(format!("{missing} not found, and only root can install packages"))
        }
    }
}

/// Returns whether a program is on `PATH`.
fn on_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_tools_are_installed_by_root_alone() {
        assert_eq!(plan(vec![], false, false), Plan::Nothing);
        assert_eq!(plan(vec!["tc"], true, true), Plan::Install);
        assert!(matches!(plan(vec!["ip", "tc"], true, false), Plan::Skip(why)
            if why.starts_with("ip and tc not found")));
        assert!(matches!(plan(vec!["tc"], false, true), Plan::Skip(why)
            if why.contains("only root")));
    }

    #[test]
    fn a_program_is_found_on_the_path() {
        assert!(on_path("sh"));
        assert!(!on_path("racksum-no-such-program"));
    }
}
