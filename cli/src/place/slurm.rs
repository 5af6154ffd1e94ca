//! `racksum place --slurm`: plans on the hosts of an allocation, and prints commands that start the
//! aggregators and ranks there.
//!
//! Facts about Slurm are from sbatch(1) and srun(1): a task takes `SLURM_CPUS_PER_TASK` cores, or
//! one; a step with `--overlap` shares the resources of the other steps; and the distribution
//! `arbitrary` starts tasks on the hosts of `SLURM_HOSTFILE`, one line for each.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

use racksum_placer::import::slurm::{AllocationError, UNTYPED, gpus, per_host};
use racksum_placer::import::{Import, NicRate};
use racksum_placer::inventory::Inventory;
use racksum_placer::job::Job;
use racksum_proto::peer_text::PeerText;
use serde::Serialize;
use serde_json::{Value, json};

use super::Planned;
use crate::cluster_file::wrong;
use crate::environment::{AGGREGATOR, IDENTITY, variable};
use crate::exit::Failure;
use crate::inventory::{Gpus, HostList, host_list, read_topology, warn_of_notes, with_rates};
use crate::{args, stderr};

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Slurm")]
pub(super) struct Slurm {
    /// Plan on the hosts of this allocation, and print an `srun` line for each aggregator.
    #[arg(long, conflicts_with = "nodes", requires = "nic_mbit")]
    slurm: bool,
    /// Slurm's topology file [default: topology.yaml or topology.conf beside SLURM_CONF, or in
    /// /etc/slurm or /run/slurm/conf].
    #[arg(long, value_name = "FILE", requires = "slurm")]
    topology: Option<PathBuf>,
    /// The topology to plan on: a name in topology.yaml; tree or block of a topology.conf that has
    /// both [default: the default of the cluster, or the only one].
    #[arg(long, value_name = "NAME", requires = "slurm")]
    topology_name: Option<String>,
    /// Rate of the hosts' network interfaces in Mbit/s, or of some, as in n[1-4]=25000; Slurm does
    /// not know it. May be given several times.
    #[arg(long, value_name = "[HOSTS=]RATE", requires = "slurm")]
    nic_mbit: Vec<NicRate>,
    /// Hosts of the allocation [default: SLURM_JOB_NODELIST].
    #[arg(long, value_name = "HOSTS", value_parser = host_list, requires = "slurm")]
    hosts: Option<HostList>,
    /// CPU cores of each host in the allocation [default: SLURM_JOB_CPUS_PER_NODE].
    #[arg(long, value_name = "N", value_parser = args::number::<u32>(args::ANY_U32))]
    #[arg(requires = "slurm")]
    cpus_per_node: Option<u32>,
    /// GPUs of each host in the allocation, optionally by type, such as 8 or h100:8 [default:
    /// SLURM_GPUS_PER_NODE].
    #[arg(long, value_name = "[TYPE:]N", value_parser = gpus, requires = "slurm")]
    gpus_per_node: Option<Gpus>,
    /// Flags for `racksum aggregator` in the printed lines. {host} stands for the host's name.
    #[arg(last = true, value_name = "AGGREGATOR FLAGS", requires = "slurm")]
    aggregator: Vec<String>,
}

impl Slurm {
    pub(super) const fn is_set(&self) -> bool {
        self.slurm
    }

    /// Returns the hosts of the allocation, and the name of their source for errors. A job that
    /// names no cores for its ranks gets those of Slurm's tasks.
    pub(super) fn inventory(&self, job: &mut Job) -> Result<(PathBuf, Inventory), Failure> {
        let hosts = self.hosts()?;
        let (file, mut import) = self.topology(&hosts)?;
        let cpus = self.cpus(hosts.len())?;
        let gpus = self.gpus(hosts.len(), job)?;
        for (host, cpus) in import.hosts.iter_mut().zip(cpus) {
            host.cpus = cpus;
            host.gpus.clone_from(&gpus);
        }
        if job.cpus_per_rank == 0 {
            job.cpus_per_rank = number("SLURM_CPUS_PER_TASK")?.unwrap_or(1).max(1);
        }
        if let Some(tasks) = number("SLURM_NTASKS")?.filter(|tasks| *tasks != job.ranks) {
            stderr::warn(format_args!(
                "SLURM_NTASKS is {tasks}, and the job has {} ranks; the printed commands start the \
                 job's ranks",
                job.ranks
            ));
        }
        warn_of_notes(&file, &mut import);
        let inventory = with_rates(&import, &self.nic_mbit, &file)?;
        Ok((file, inventory))
    }

    fn hosts(&self) -> Result<Vec<String>, Failure> {
        if let Some(HostList(hosts)) = &self.hosts {
            return Ok(hosts.clone());
        }
        if let Some(components) = number("SLURM_HET_SIZE")?.filter(|size| *size > 1) {
            return Err(Failure::usage(format!(
                "the allocation has {components} components, which are not planned together; pass \
                 the hosts of one with --hosts, such as --hosts \
                 \"$SLURM_JOB_NODELIST_HET_GROUP_0\""
            )));
        }
        let text = needed("SLURM_JOB_NODELIST", "--hosts")?;
        let HostList(hosts) = host_list(&text).map_err(|why| unclear("SLURM_JOB_NODELIST", why))?;
        Ok(hosts)
    }

    /// Returns the hosts' places in the topology, and the file that says so.
    fn topology(&self, hosts: &[String]) -> Result<(PathBuf, Import), Failure> {
        let folders = match variable("SLURM_CONF")? {
            Some(conf) => {
                vec![Path::new(&conf).parent().unwrap_or_else(|| Path::new("")).to_owned()]
            }
            None => FOLDERS.map(PathBuf::from).to_vec(),
        };
        let usual = || {
            let files = folders.iter().flat_map(|folder| FILES.map(|file| folder.join(file)));
            files.into_iter().find(|file| file.exists())
        };
        let Some(file) = self.topology.clone().or_else(usual) else {
            let folders: Vec<_> =
                folders.iter().map(|folder| folder.display().to_string()).collect();
            stderr::warn(format_args!(
                "{} has neither {}, so the plan treats the network as flat, as Slurm does; \
                 --topology names a file elsewhere",
                folders.join(" or "),
                FILES.join(" nor ")
            ));
            let allocation = PathBuf::from("the allocation");
            let flat = Import::default().only(hosts).map_err(|error| wrong(&allocation, error))?;
            return Ok((allocation, flat));
        };
        let import = read_topology(&file, self.topology_name.as_deref())?;
        let checked = import.check_rates(&self.nic_mbit);
        let import = checked.and_then(|()| import.only(hosts));
        let import = import.map_err(|error| wrong(&file, error))?;
        Ok((file, import))
    }

    fn cpus(&self, hosts: usize) -> Result<Vec<u32>, Failure> {
        if let Some(cpus) = self.cpus_per_node {
            return Ok(vec![cpus; hosts]);
        }
        let text = needed("SLURM_JOB_CPUS_PER_NODE", "--cpus-per-node")?;
        per_host(&text, hosts).map_err(|why| {
            let advice = match why {
                AllocationError::Hosts { .. } => "; pass --cpus-per-node with --hosts",
                _ => "",
            };
            unclear("SLURM_JOB_CPUS_PER_NODE", format_args!("{why}{advice}"))
        })
    }

    fn gpus(&self, hosts: usize, job: &Job) -> Result<Gpus, Failure> {
        if let Some(gpus) = &self.gpus_per_node {
            return Ok(gpus.clone());
        }
        let of = |name: &'static str| {
            let text = variable(name)?;
            text.map(|text| gpus(&text).map_err(|why| unclear(name, why))).transpose()
        };
        match (of("SLURM_GPUS_PER_NODE")?, of("SLURM_GPUS_ON_NODE")?) {
            (Some(gpus), _) => Ok(gpus),
            (None, Some(gpus)) if hosts == 1 => Ok(gpus),
            (None, _) if job.gpus_per_rank == 0 => Ok(Gpus::new()),
            (None, here) => Err(Failure::usage(format!(
                "the job needs GPUs, and Slurm does not say how many each host has{}; pass \
                 --gpus-per-node [TYPE:]N",
                match here.as_ref().and_then(Gpus::first_key_value) {
                    Some((_, here)) => format!(" (SLURM_GPUS_ON_NODE={here} is about this one)"),
                    None => String::new(),
                }
            ))),
        }
    }

    /// Returns the commands that start the aggregators and ranks of a plan.
    pub(super) fn launch(&self, planned: &Planned<'_>, port: u16) -> Result<Launch, Failure> {
        if let Some(flag) = self.aggregator.iter().find(|flag| is_one_of(flag, &OWN)) {
            return Err(Failure::usage(format!(
                "remove {flag} after --: the plan sets the shards, and --port before -- the port"
            )));
        }
        let has_identity = self.aggregator.iter().any(|flag| is_one_of(flag, &IDENTITIES));
        if !has_identity && variable(IDENTITY)?.is_none() {
            stderr::warn(
                "the printed aggregators have no identity and will not serve other hosts; end \
                 this command with -- --identity FILE, or with -- --insecure",
            );
        }
        let Planned { topology, job, plan, .. } = planned;
        if plan.tree.is_some() || !plan.standbys.is_empty() {
            return Err(Failure::usage(
                "--slurm prints no commands for aggregators of racks or standbys; remove `racks` \
                 and `standbys` from the job, or plan with --nodes and start them yourself",
            ));
        }
        let mut launch = Launch { aggregators: vec![], ranks: Ranks::default() };
        let mut ranks_at = vec![];
        let mut used = 0;
        for (host, ranks, aggregators) in planned.hosts() {
            let host = topology.host(host).name.as_str();
            // One process per host stands for all of its aggregators.
            let shards = aggregators.saturating_mul(planned.shards.max(1));
            if u64::from(shards) > *args::SHARDS.end() {
                return Err(Failure::unavailable(format!(
                    "the plan has {shards} shards on {host}, and one process has at most {}; lower \
                     `aggregators` or `shards` in the job",
                    args::SHARDS.end()
                )));
            }
            if aggregators > 0 {
                let cpus = aggregators.saturating_mul(job.cpus_per_aggregator).max(shards);
                launch.aggregators.push(self.aggregator(host, (port, shards, cpus))?);
            }
            used += usize::from(!ranks.is_empty());
            ranks_at.extend(ranks.iter().map(|rank| (*rank, host)));
        }
        // The host file lists the hosts by rank.
        ranks_at.sort_unstable();
        launch.ranks.hosts = ranks_at.into_iter().map(|(_, host)| host.to_owned()).collect();
        launch.ranks.command = ranks_command(job, used)?;
        Ok(launch)
    }

    fn aggregator(
        &self,
        host: &str,
        (port, shards, cpus): (u16, u32, u32),
    ) -> Result<Aggregator, Failure> {
        let (nodelist, cpus) = (format!("--nodelist={host}"), format!("--cpus-per-task={cpus}"));
        // The step shares the host with ranks, and leaves them the GPUs.
        let step = ["--nodes=1", "--ntasks=1", &nodelist, &cpus, "--overlap", "--gres=none"];
        let mut command = srun(JOB_FLAGS.into_iter().chain(["SLURM_MEM_PER_GPU"]))?;
        command.extend(step.map(Into::into));
        command.extend([program(), "aggregator".into()]);
        if !self.aggregator.iter().any(|flag| is_one_of(flag, &["--bind"])) {
            command.extend(["--bind", "0.0.0.0"].map(Into::into));
        }
        command.extend(["--port".into(), port.to_string()]);
        if shards > 1 {
            command.extend(["--shards".into(), shards.to_string()]);
        }
        command.extend(self.aggregator.iter().map(|flag| flag.replace("{host}", host)));
        Ok(Aggregator { host: host.into(), address: format!("{host}:{port}"), command })
    }
}

/// Returns the command that starts ranks on this number of hosts, without their program.
fn ranks_command(job: &Job, hosts: usize) -> Result<Vec<String>, Failure> {
    let mut command = srun(JOB_FLAGS)?;
    command.extend([
        "--distribution=arbitrary".into(),
        format!("--nodes={hosts}"),
        format!("--ntasks={}", job.ranks),
        format!("--cpus-per-task={}", job.cpus_per_rank),
    ]);
    if job.gpus_per_rank > 0 {
        let kind = job.gpu_type.iter().filter(|kind| *kind != UNTYPED);
        let kind = kind.map(|kind| format!("{kind}:")).collect::<String>();
        command.push(format!("--gpus-per-task={kind}{}", job.gpus_per_rank));
    }
    Ok(command)
}

/// Returns the beginning of a command: `srun`, without those of some variables that are set here.
fn srun(unset: impl IntoIterator<Item = &'static str>) -> Result<Vec<String>, Failure> {
    let mut command = vec![];
    for name in unset {
        if variable(name)?.is_some() {
            command.extend(["-u".into(), name.into()]);
        }
    }
    if !command.is_empty() {
        command.insert(0, "env".into());
    }
    command.push("srun".into());
    Ok(command)
}

/// The commands that start a plan.
#[derive(Debug)]
pub(super) struct Launch {
    aggregators: Vec<Aggregator>,
    ranks: Ranks,
}

#[derive(Debug, Serialize)]
struct Aggregator {
    host: String,
    /// The address for ranks, `HOST:PORT`.
    address: String,
    command: Vec<String>,
}

#[derive(Debug, Default, Serialize)]
struct Ranks {
    /// The command without the ranks' program.
    command: Vec<String>,
    /// The host of each rank.
    hosts: Vec<String>,
}

impl Launch {
    /// Returns the aggregators in the syntax of [`AGGREGATOR`].
    fn addresses(&self) -> String {
        let addresses = self.aggregators.iter().map(|aggregator| aggregator.address.as_str());
        addresses.collect::<Vec<_>>().join("+")
    }

    /// Returns a plan in JSON with the commands as its key `slurm`.
    pub(super) fn added_to(&self, plan: &str) -> String {
        let mut plan: Value = serde_json::from_str(plan).expect("a plan in JSON is JSON");
        plan["slurm"] = json!({
            "aggregators": self.aggregators,
            "environment": { AGGREGATOR: self.addresses() },
            "ranks": self.ranks,
        });
        plan.to_string()
    }

    /// Returns the commands as lines of a POSIX shell.
    ///
    /// Ranks start once the aggregators serve, since they would not wait long for an answer. If an
    /// aggregator fails first, the exit code is that of [`Failure::unavailable`]. Names of hosts
    /// need no quotes, because host lists have none of the characters that do.
    ///
    /// # Errors
    /// If an argument contains a null character, which no command line can contain.
    pub(super) fn shell(&self) -> Result<String, Failure> {
        let mut lines = vec![
            "# Start the aggregators. Each prints a line once it serves.".to_owned(),
            "racksum_out=$(mktemp -d) || exit".into(),
        ];
        for Aggregator { host, command, .. } in &self.aggregators {
            lines.push(format!(
                "{{ {} > \"$racksum_out\"/out.{host} || touch \"$racksum_out\"/failed; }} &",
                line(command)?
            ));
        }
        let aggregators: Vec<_> = self.aggregators.iter().map(|it| it.host.as_str()).collect();
        lines.push(format!("export {AGGREGATOR}={}", self.addresses()));
        lines.push(format!(
            "# Start the ranks, each on its host: racksum_ranks PROGRAM [ARGUMENTS].\n\
             racksum_ranks() (\n    \
                 for host in {}; do\n        \
                     until [ -s \"$racksum_out\"/out.$host ]; do\n            \
                         [ ! -e \"$racksum_out\"/failed ] || exit 3\n            \
                         sleep 0.1\n        \
                     done\n    \
                 done\n    \
                 printf '%s\\n' {} > \"$racksum_out\"/ranks || exit\n    \
                 SLURM_HOSTFILE=$racksum_out/ranks {} \"$@\"\n\
             )",
            aggregators.join(" "),
            self.ranks.hosts.join(" "),
            line(&self.ranks.command)?
        ));
        Ok(lines.join("\n"))
    }
}

/// Returns words as part of a POSIX shell's command line.
fn line(words: &[String]) -> Result<String, Failure> {
    // shlex also quotes words with an equals sign, which is needed in the first word only.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+".contains(c);
    let quoted = words.iter().map(|word| {
        if !word.is_empty() && word.chars().all(is_plain) {
            return Ok(Cow::Borrowed(word.as_str()));
        }
        shlex::try_quote(word)
    });
    let quoted: Result<Vec<_>, _> = quoted.collect();
    let contains_null = |_| Failure::usage("a flag after -- contains a null character; remove it");
    Ok(quoted.map_err(contains_null)?.join(" "))
}

/// Returns the program as the user called it, so that hosts with the same files find it.
fn program() -> String {
    let called = std::env::args_os().next().and_then(|program| program.into_string().ok());
    called.unwrap_or_else(|| "racksum".into())
}

/// Returns whether a word of a command line is one of these flags.
fn is_one_of(word: &str, flags: &[&str]) -> bool {
    flags.contains(&word.split_once('=').map_or(word, |(flag, _)| flag))
}

/// Returns the number in a variable, or `None` if it is not set.
fn number(name: &str) -> Result<Option<u32>, Failure> {
    let text = variable(name)?;
    let parsed = text.map(|text| {
        text.parse().map_err(|_| unclear(name, format_args!("{text:?} is not a whole number")))
    });
    parsed.transpose()
}

/// Returns a variable that Slurm sets in every allocation.
fn needed(name: &str, flag: &str) -> Result<String, Failure> {
    variable(name)?.ok_or_else(|| {
        Failure::usage(format!(
            "{name} is not set; run this inside an allocation (salloc or sbatch), or pass {flag}"
        ))
    })
}

fn unclear(name: &str, why: impl fmt::Display) -> Failure {
    Failure::usage(PeerText::of(format_args!("{name}: {why}")).as_str())
}

/// The folders of Slurm's configuration: the usual one, and that of nodes which get it from the
/// controller.
const FOLDERS: [&str; 2] = ["/etc/slurm", "/run/slurm/conf"];
/// The topology files, in the order in which Slurm looks for them.
const FILES: [&str; 2] = ["topology.yaml", "topology.conf"];
/// The variables in which sbatch and salloc repeat flags of the job, and which srun takes for flags
/// of a step. With SLURM_GPUS_PER_NODE, `srun --gres=none` fails, and tasks get too many GPUs.
const JOB_FLAGS: [&str; 11] = [
    "SLURM_CPUS_PER_GPU",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_TRES_PER_TASK",
];
/// The flags of aggregators that this command sets itself.
const OWN: [&str; 2] = ["--port", "--shards"];
/// The flags that say which identity an aggregator has.
const IDENTITIES: [&str; 3] = ["--identity", "--insecure", "--config"];
