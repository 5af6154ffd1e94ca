//! The aggregator's configuration: its keys, their ranges, and its errors.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;

use racksum_net::interface::no_host;
use racksum_proto::auth::DataAuth;
use racksum_proto::control::POOL_SLOTS;
use racksum_proto::counted::counted;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use toml::de::DeTable;
use toml::{Table, Value};

use crate::Options;
use crate::admit_rule::Admit;

/// The maximum number of shards of an aggregator.
pub const MAX_SHARDS: u8 = 64;

const LEAST_SLOTS: u64 = *POOL_SLOTS.start() as u64;
const MOST_SLOTS: u64 = *POOL_SLOTS.end() as u64;

/// How results reach the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fanout {
    /// Multicast to the ranks that receive a ping before the job runs, and a copy to every other
    /// rank.
    Auto,
    /// Multicast only; a job is refused if one of its ranks receives no ping.
    Multicast,
    /// One copy to each rank.
    Unicast,
}

/// An aggregator's configuration, from the defaults, a file, or flags.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The address to serve on.
    #[serde(deserialize_with = "read_bind_address")]
    pub bind: IpAddr,
    /// The UDP port of the control plane; shard `i` takes `port + 1 + i`. 0 lets the system choose
    /// all ports.
    pub port: u16,
    /// The number of shards: threads, each with a socket of its own.
    pub shards: u8,
    /// The maximum number of slots of each stream of a job.
    pub pool_slots: u32,
    /// The size in MiB of the packet buffers that each shard allocates at start. Without rules, the
    /// jobs share them equally.
    pub pool_mib: u32,
    /// The maximum number of jobs at a time.
    pub max_jobs: u16,
    /// The maximum number of ranks of all jobs together.
    pub max_ranks: u32,
    /// The maximum time in seconds between the joins of a job's first and last ranks.
    pub join_timeout_s: u32,
    /// How results reach the ranks.
    pub fanout: Fanout,
    /// The file with the aggregator's identity. If it is set, the aggregator serves only callers
    /// with an identity from an authority that it trusts.
    pub identity: Option<PathBuf>,
    /// Whether to serve beyond loopback without identities.
    pub insecure: bool,
    /// The path of the unix socket that reports the aggregator's status; `None` for no socket.
    pub status_socket: Option<PathBuf>,
    /// How datagrams are authenticated. The default is `none` on loopback, and `mac` elsewhere.
    pub data_auth: Option<DataAuth>,
    /// The parent, as `HOST:PORT`: the aggregator that adds this aggregator's sums to those of
    /// other aggregators. Without a parent, the sums are the results.
    pub parent: Option<String>,
    /// The rules that say which identities may join which jobs. Without rules, every caller may
    /// join any job.
    pub admit: Vec<Admit>,
}

/// The default UDP port of an aggregator's control server.
pub const PORT: u16 = 7177;

impl Default for Config {
    fn default() -> Self {
        Self {
            bind: IpAddr::from([127, 0, 0, 1]),
            port: PORT,
            shards: 1,
            pool_slots: 256,
            pool_mib: 1024,
            max_jobs: 8,
            max_ranks: 4096,
            join_timeout_s: 600,
            fanout: Fanout::Auto,
            identity: None,
            insecure: false,
            status_socket: None,
            data_auth: None,
            parent: None,
            admit: Vec::new(),
        }
    }
}

/// The reason why a configuration is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file is not TOML, or contains an unknown key or a wrong value.
    #[error("line {line}: {why}")]
    Parse {
        /// The line number, counted from 1.
        line: usize,
        /// The parser's reason.
        why: String,
    },
    /// Any other error about a value, with its line in the file.
    #[error("line {line}: {error}")]
    At {
        /// The line number, counted from 1.
        line: usize,
        /// The error about the value.
        error: Box<Self>,
    },
    /// A number is out of range.
    #[error("{key} must be from {min} to {max}, not {value}")]
    Range {
        /// The key as it appears in the file, followed by its rule's number if it belongs to a
        /// rule. The command-line flag has dashes instead of underscores.
        key: String,
        /// The value that was given.
        value: i64,
        /// The smallest allowed value.
        min: u64,
        /// The largest allowed value.
        max: u64,
    },
    /// The value of a numeric key is not a whole number.
    #[error("{key} must be a whole number from {min} to {max}, but its type is {what}")]
    NoNumber {
        /// The key as it appears in the file, followed by the number of its rule, if any.
        key: String,
        /// The TOML type of the value.
        what: &'static str,
        /// The smallest allowed value.
        min: u64,
        /// The largest allowed value.
        max: u64,
    },
    /// The rules are written as one table instead of a list of tables.
    #[error("line {line}: the rules must be a list of tables; write [[admit]], not [admit]")]
    AdmitTable {
        /// The line number, counted from 1.
        line: usize,
    },
    /// A required value is empty.
    #[error("{key} must be {what}, not empty")]
    Empty {
        /// The key as it appears in the file, followed by the number of its rule, if any.
        key: String,
        /// A description of the required value.
        what: &'static str,
    },
    /// The address to serve on is link-local.
    #[error(
        "bind must not be a link-local address such as {bind}; bind another address of this host, \
         or :: for all of them"
    )]
    LinkLocal {
        /// The link-local address.
        bind: Ipv6Addr,
    },
    /// Rules name identities, but no identity file is given.
    #[error(
        "[[admit]] rules match names of identities, but no identity is set; pass --identity, or \
         remove the rules"
    )]
    AdmitWithoutIdentity,
    /// The value of `parent` is not the address of another aggregator.
    #[error("parent must be the HOST:PORT of another aggregator, not {parent:?}")]
    Parent {
        /// The value that was given.
        parent: String,
    },
    /// The packet buffers of all shards together are larger than this host's memory.
    #[error("{}", self.message_with_options(Options::USUAL.memory))]
    Memory {
        /// The number of shards.
        shards: u8,
        /// The size in MiB of each shard's packet buffers.
        pool_mib: u32,
        /// The host's memory in MiB.
        host_mib: u64,
    },
}

impl ConfigError {
    /// Returns the key that the error is about, including its rule.
    fn key(&self) -> Option<&str> {
        match self {
            Self::Range { key, .. } | Self::NoNumber { key, .. } | Self::Empty { key, .. } => {
                Some(key)
            }
            Self::LinkLocal { .. } => Some("bind"),
            _ => None,
        }
    }

    /// Returns the error message for a program whose users set the amount of memory with these
    /// options.
    #[must_use]
    pub fn message_with_options(&self, options: &[&str]) -> String {
        let Self::Memory { shards, pool_mib, host_mib } = self else { return self.to_string() };
        let advice = match options {
            [] => "use a host with more memory".to_owned(),
            options => format!("lower {}", options.join(" or ")),
        };
        format!(
            "the packet buffers of {}, {pool_mib} MiB each, exceed the {host_mib} MiB of memory of \
             this host; {advice}",
            counted(*shards, "shard")
        )
    }
}

impl Config {
    /// Reads a configuration file; missing keys keep their defaults.
    ///
    /// # Errors
    /// The file is invalid. The error names the line, the key, and the reason.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let no_toml = |error: toml::de::Error| {
            let why = error.message().replace('\n', "; ");
            ConfigError::Parse {
                line: line_at(text, error.span()),
                why: format!("invalid TOML: {why}"),
            }
        };
        let at_line = |error: ConfigError| match error.key().and_then(|key| line_of(text, key)) {
            Some(line) => ConfigError::At { line, error: Box::new(error) },
            None => error,
        };
        // Check the numbers first: if a number does not fit its type, the deserializer's error
        // names the type instead of the key.
        check_numbers(&toml::from_str(text).map_err(no_toml)?).map_err(at_line)?;
        let config: Self =
            toml::from_str(text).map_err(|error| match parse_error(text, &error) {
                ConfigError::Parse { line, why } if why.starts_with("admit: invalid type: map") => {
                    ConfigError::AdmitTable { line }
                }
                error => error,
            })?;
        config.check_ranges().map_err(at_line)?;
        Ok(config)
    }

    /// Checks that each value is valid, and that the values are consistent.
    ///
    /// # Errors
    /// The configuration is invalid. The error describes the first problem found.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_ranges()?;
        if !self.admit.is_empty() && self.identity.is_none() {
            return Err(ConfigError::AdmitWithoutIdentity);
        }
        match &self.parent {
            Some(parent) if !self.may_be_parent(parent) => {
                Err(ConfigError::Parent { parent: parent.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Returns whether `parent` can be the address of another aggregator. A host name need not
    /// resolve yet.
    fn may_be_parent(&self, parent: &str) -> bool {
        let Some((host, port)) = parent.rsplit_once(':') else { return false };
        let addr = parent.parse::<SocketAddr>();
        let is_self = addr == Ok(SocketAddr::new(self.bind, self.port));
        if addr.is_ok_and(|addr| no_host(addr.ip()).is_some()) {
            return false;
        }
        let is_one = !host.is_empty() && !host.contains([',', '+', ' ']);
        is_one && port.parse::<u16>().is_ok_and(|port| port > 0) && !is_self
    }

    /// Checks each value on its own, for example that a number is within its range.
    ///
    /// # Errors
    /// A value is invalid. The error names the first invalid value.
    fn check_ranges(&self) -> Result<(), ConfigError> {
        let numbers = [
            i64::from(self.shards),
            self.pool_slots.into(),
            self.pool_mib.into(),
            self.max_jobs.into(),
            self.max_ranks.into(),
            self.join_timeout_s.into(),
            self.port.into(),
        ];
        for (range, value) in ranges(self.shards).into_iter().zip(numbers) {
            check_range(range, value, str::to_owned)?;
        }
        if let IpAddr::V6(bind) = self.bind
            && bind.is_unicast_link_local()
        {
            return Err(ConfigError::LinkLocal { bind });
        }
        for (key, path) in [("identity", &self.identity), ("status_socket", &self.status_socket)] {
            if path.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
                return Err(ConfigError::Empty { key: key.into(), what: "a file path" });
            }
        }
        (1..).zip(&self.admit).try_for_each(|(number, rule)| check_rule(number, rule))
    }

    /// Checks that the packet buffers fit the host's memory. The kernel provides their memory page
    /// by page as jobs use it. If they were too large, the kernel would therefore kill the process
    /// in the middle of a job.
    ///
    /// # Errors
    /// The packet buffers are larger than the host's memory.
    pub fn check_memory(&self, host_mib: u64) -> Result<(), ConfigError> {
        let Self { shards, pool_mib, .. } = *self;
        if u64::from(shards) * u64::from(pool_mib) > host_mib {
            return Err(ConfigError::Memory { shards, pool_mib, host_mib });
        }
        Ok(())
    }

    /// Shrinks packet buffers of the default size until they take at most half of the host's
    /// memory, since other programs need memory too. The default size never prevents an aggregator
    /// from starting. Returns a warning if the buffers have shrunk.
    ///
    /// # Errors
    /// The packet buffers do not have the default size, and do not fit the host's memory.
    pub(crate) fn fit_memory(&mut self, host_mib: u64) -> Result<Option<String>, ConfigError> {
        let usual = Self::default().pool_mib;
        if self.pool_mib != usual {
            return self.check_memory(host_mib).map(|()| None);
        }
        let each = host_mib / 2 / u64::from(self.shards.max(1));
        self.pool_mib = u32::try_from(each).unwrap_or(usual).clamp(1, usual);
        Ok((self.pool_mib < usual).then(|| {
            format!(
                "the packet buffers of {} have {} MiB each instead of {usual} MiB, because this \
                 host has {host_mib} MiB of memory",
                counted(self.shards, "shard"),
                self.pool_mib
            )
        }))
    }

    /// Returns how datagrams are authenticated.
    #[must_use]
    pub fn data_auth(&self) -> DataAuth {
        let usual = if self.bind.is_loopback() { DataAuth::None } else { DataAuth::Mac };
        self.data_auth.unwrap_or(usual)
    }

    /// Returns the keys that differ from the running aggregator's configuration and take effect
    /// only after a restart.
    #[must_use]
    pub fn fixed_changes(&self, running: &Self) -> Vec<&'static str> {
        let changes = [
            ("bind", self.bind != running.bind),
            ("port", self.port != running.port),
            ("shards", self.shards != running.shards),
            ("pool_mib", self.pool_mib != running.pool_mib),
            ("fanout", self.fanout != running.fanout),
            ("insecure", self.insecure != running.insecure),
            ("status_socket", self.status_socket != running.status_socket),
            ("parent", self.parent != running.parent),
            // Another identity file can replace the first, but only a restart turns certificate
            // checks on or off.
            ("identity", self.identity.is_some() != running.identity.is_some()),
        ];
        changes.into_iter().filter(|(_, differs)| *differs).map(|(key, _)| key).collect()
    }

    /// Returns this configuration, but with the running configuration's values for the keys that
    /// need a restart.
    pub(crate) fn with_fixed_of(self, running: &Self) -> Self {
        let Self { bind, port, shards, pool_mib, fanout, insecure, .. } = *running;
        let (status_socket, parent) = (running.status_socket.clone(), running.parent.clone());
        let identity = if running.identity.is_some() { self.identity } else { None };
        let identity = identity.or_else(|| running.identity.clone());
        Self {
            bind,
            port,
            shards,
            pool_mib,
            fanout,
            insecure,
            status_socket,
            identity,
            parent,
            ..self
        }
    }

    /// Returns the number of packet buffers of each shard.
    #[must_use]
    pub fn buffers(&self) -> usize {
        let per_mib = (1 << 20) / racksum_net::udp::RECV_CAPACITY;
        self.pool_mib as usize * per_mib
    }
}

/// A key, with its smallest and its largest allowed value.
type Bounds = (&'static str, u64, u64);

/// Returns the ranges of the numeric keys outside `[[admit]]` rules, in the order in which they are
/// checked.
fn ranges(shards: u8) -> [Bounds; 7] {
    // The shards take the ports after the control port.
    let ports = u64::from(u16::MAX) - u64::from(shards);
    [
        ("shards", 1, u64::from(MAX_SHARDS)),
        ("pool_slots", LEAST_SLOTS, MOST_SLOTS),
        ("pool_mib", 1, 1 << 20),
        ("max_jobs", 1, 1024),
        ("max_ranks", 1, 1 << 18),
        ("join_timeout_s", 1, 7 * 24 * 3600),
        ("port", 0, ports),
    ]
}

/// Returns the range of a numeric key outside `[[admit]]` rules, or `None` for any other key. The
/// range of `port` assumes one shard.
#[must_use]
pub fn bounds(key: &str) -> Option<RangeInclusive<u64>> {
    let all = ranges(Config::default().shards);
    all.into_iter().find(|(name, ..)| *name == key).map(|(_, min, max)| min..=max)
}

/// The ranges of the numeric keys in an `[[admit]]` rule.
const RULE_RANGES: [Bounds; 4] = [
    ("max_jobs", 1, 1024),
    ("max_ranks", 1, 1 << 18),
    ("pool_slots", LEAST_SLOTS, MOST_SLOTS),
    ("share_percent", 1, 100),
];

fn check_range(
    (key, min, max): Bounds,
    value: i64,
    named: impl Fn(&str) -> String,
) -> Result<(), ConfigError> {
    if u64::try_from(value).is_ok_and(|value| (min..=max).contains(&value)) {
        return Ok(());
    }
    Err(ConfigError::Range { key: named(key), value, min, max })
}

/// Returns a function that names a key of a file's `number`th rule, for error messages.
fn of_rule(number: usize) -> impl Fn(&str) -> String {
    move |key| format!("{key} of [[admit]] rule {number}")
}

/// Returns the line number of a key's value. The key may end with its rule, as [`of_rule`] writes
/// it.
fn line_of(text: &str, key: &str) -> Option<usize> {
    let file = DeTable::parse(text).ok()?;
    let (key, rule) = match key.split_once(" of [[admit]] rule ") {
        Some((key, number)) => (key, Some(number.parse::<usize>().ok()?)),
        None => (key, None),
    };
    // In "a name in jobs", the key is the last word.
    let key = key.rsplit(' ').next()?;
    let value = match rule {
        None => file.get_ref().get(key)?,
        Some(number) => {
            let rules = file.get_ref().get("admit")?.get_ref().as_array()?;
            rules.get(number.checked_sub(1)?)?.get_ref().as_table()?.get(key)?
        }
    };
    Some(line_at(text, Some(value.span())))
}

/// Returns the line number of a span in a text, counted from 1.
fn line_at(text: &str, span: Option<Range<usize>>) -> usize {
    let at = span.map_or(0, |span| span.start.min(text.len()));
    1 + text.get(..at).unwrap_or_default().matches('\n').count()
}

/// Checks that the numeric values of a file are integers in range.
fn check_numbers(file: &Table) -> Result<(), ConfigError> {
    let check = |table: &Table, range: Bounds, named: &dyn Fn(&str) -> String| {
        let (key, min, max) = range;
        match table.get(key) {
            None => Ok(()),
            Some(Value::Integer(value)) => check_range(range, *value, named),
            Some(other) => {
                let what = other.type_str();
                Err(ConfigError::NoNumber { key: named(key), what, min, max })
            }
        }
    };
    let shards = file.get("shards").and_then(Value::as_integer);
    let shards = shards.and_then(|shards| u8::try_from(shards).ok());
    for range in ranges(shards.unwrap_or_else(|| Config::default().shards)) {
        check(file, range, &str::to_owned)?;
    }
    let rules = file.get("admit").and_then(Value::as_array).into_iter().flatten();
    for (number, rule) in (1..).zip(rules.filter_map(Value::as_table)) {
        RULE_RANGES.into_iter().try_for_each(|range| check(rule, range, &of_rule(number)))?;
    }
    Ok(())
}

/// Converts a TOML error to an error that names the line and the key.
fn parse_error(text: &str, error: &toml::de::Error) -> ConfigError {
    let at = error.span().map_or(0, |span| span.start.min(text.len()));
    let before = text.get(..at).unwrap_or_default();
    let line = line_at(text, error.span());
    let begun = before.rsplit('\n').next().unwrap_or_default();
    let rest = text.get(at..).unwrap_or_default();
    let key = match begun.split_once('=') {
        Some((key, _)) => Some(key.trim()),
        // If the file has a table where another type was expected, the table's name is the key.
        None if begun.trim().is_empty() && error.message().starts_with("invalid type") => {
            rest.lines().next().and_then(|line| line.trim().strip_prefix('[')?.strip_suffix(']'))
        }
        None => None,
    };
    let why = error.message();
    let why = key.map_or_else(|| why.to_owned(), |key| format!("{key}: {why}"));
    ConfigError::Parse { line, why }
}

/// Parses the address to serve on. A link-local address may have a zone, as in `fe80::1%eth0`.
/// [`Config::validate`] rejects all link-local addresses.
///
/// # Errors
/// The text is not an IP address, or is one that no host can have, such as a multicast address.
pub fn bind_address(text: &str) -> Result<IpAddr, String> {
    let zoned = text.split_once('%').and_then(|(addr, _)| addr.parse().ok());
    if let Some(zoned) = zoned.filter(Ipv6Addr::is_unicast_link_local) {
        return Ok(zoned.into());
    }
    let addr: IpAddr = text.parse().map_err(|_| match text.parse::<SocketAddr>() {
        Ok(both) => {
            format!(
                "{text:?} includes a port; set bind to {} and port to {}",
                both.ip(),
                both.port()
            )
        }
        Err(_) => {
            format!("{text:?} is not an IP address; give an address of this host, such as 10.0.0.1")
        }
    })?;
    // Accept the unspecified address, which means all addresses of this host.
    match no_host(addr).filter(|_| !addr.is_unspecified()) {
        Some(why) => Err(format!("cannot serve at {addr}, {why}; give an address of this host")),
        None => Ok(addr),
    }
}

fn read_bind_address<'de, D: Deserializer<'de>>(from: D) -> Result<IpAddr, D::Error> {
    bind_address(&String::deserialize(from)?).map_err(D::Error::custom)
}

/// Checks the `number`th rule of the file.
fn check_rule(number: usize, rule: &Admit) -> Result<(), ConfigError> {
    let Admit { ref identity, ref jobs, max_jobs, max_ranks, pool_slots, share_percent } = *rule;
    let key = of_rule(number);
    for (name, is_empty, what) in [
        ("identity", identity.is_empty(), "a pattern for certificate names"),
        ("jobs", jobs.is_empty(), "a list of patterns for job names"),
        ("a name in jobs", jobs.iter().any(String::is_empty), "a pattern for job names"),
    ] {
        if is_empty {
            return Err(ConfigError::Empty { key: key(name), what });
        }
    }
    let numbers = [
        max_jobs.map(i64::from),
        max_ranks.map(i64::from),
        pool_slots.map(i64::from),
        share_percent.map(i64::from),
    ];
    RULE_RANGES.into_iter().zip(numbers).try_for_each(|(range, value)| {
        value.map_or(Ok(()), |value| check_range(range, value, &key))
    })
}

/// Returns the memory of this host in MiB, or `None` if the system does not report it.
#[must_use]
pub fn host_mib() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? / 1024)
}

#[cfg(test)]
mod tests;
