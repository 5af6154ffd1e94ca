//! `racksum inventory`: makes the nodes file of `racksum place` from other programs' files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use clap::{Subcommand, ValueEnum};
use racksum_placer::import::hostlist::{MOST_NAMES, expand};
use racksum_placer::import::slurm::{self, Format};
use racksum_placer::import::{Import, ImportErrorKind, NicRate, kubernetes, topograph};
use racksum_placer::inventory::Inventory;
use racksum_proto::counted::counted;
use racksum_proto::peer_text::PeerText;

use crate::cluster_file::{text_of, wrong};
use crate::exit::{Failure, print_line};
use crate::{args, stderr};

/// Prints the nodes file of `racksum place` for the hosts in another program's file.
#[derive(Debug, clap::Args)]
#[command(after_long_help = format!("{HELP}\n\n{}", args::EXIT_CODES))]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
    /// Output format.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Output::Toml, global = true)]
    format: Output,
}

/// Text of `--help` after the flags.
const HELP: &str = "\
The levels of the printed file are widest first, whatever the direction of the file that is read.
No such file has the rates of network interfaces, except for nodes of Kubernetes with the label
racksum.dev/nic-mbit. --nic-mbit gives them for the other hosts.

Examples:
  racksum inventory slurm /etc/slurm/topology.conf --nic-mbit 25000 --cpus-per-node 64
  racksum inventory topograph graph.json --nic-mbit 25000 --nic-mbit 'gpu[1-8]=100000'
  kubectl get nodes -o json > nodes.json
  racksum inventory kubernetes nodes.json --nic-mbit 25000 \\
      --levels topology.kubernetes.io/zone,example.com/rack";

#[derive(Debug, Subcommand)]
enum Command {
    /// Read Slurm's topology.conf or topology.yaml. The levels are level0 next to the hosts, level1
    /// above it and so on, as in `scontrol show topology`.
    Slurm {
        /// The topology file: YAML if its name ends in .yaml.
        file: PathBuf,
        /// The topology to read: a name in topology.yaml; tree or block of a topology.conf that has
        /// both [default: the default of the cluster, or the only one].
        #[arg(long, value_name = "NAME")]
        topology_name: Option<String>,
        #[command(flatten)]
        resources: Resources,
        #[command(flatten)]
        common: Common,
    },
    /// Read the JSON of Topograph's graph engine, whose network_layers begin with the closest
    /// switch. The levels are tier0 next to the hosts, tier1 above it and so on.
    Topograph {
        /// The JSON file.
        file: PathBuf,
        /// Name hosts by this label instead of the instance's ID.
        #[arg(long, value_name = "KEY")]
        name_label: Option<String>,
        #[command(flatten)]
        resources: Resources,
        #[command(flatten)]
        common: Common,
    },
    /// Read the output of `kubectl get nodes -o json`: labels, CPU cores and GPUs that nodes can
    /// allocate, and taints. The label racksum.dev/nic-mbit has a node's rate, unless --nic-mbit
    /// names the node.
    Kubernetes {
        /// The JSON file.
        file: PathBuf,
        /// Keys of the labels that are levels, widest first, such as
        /// topology.kubernetes.io/zone,example.com/rack.
        #[arg(long, value_name = "KEYS", value_delimiter = ',', required = true)]
        levels: Vec<String>,
        #[command(flatten)]
        common: Common,
    },
}

/// The format of the printed file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// TOML.
    Toml,
    /// JSON.
    Json,
}

/// The hosts to print, and what the file does not say about them.
#[derive(Debug, clap::Args)]
struct Common {
    /// Only these hosts, as a list of Slurm, such as n[001-064],login [default: all].
    #[arg(long, value_name = "HOSTS", value_parser = host_list)]
    hosts: Option<HostList>,
    /// Rate of the hosts' network interfaces in Mbit/s, or of some, as in n[1-4]=25000. May be
    /// given several times; a rate of named hosts wins over that of all. Every host needs one.
    #[arg(long, value_name = "[HOSTS=]RATE")]
    nic_mbit: Vec<NicRate>,
}

/// The names that a host list stands for.
#[derive(Debug, Clone)]
pub(crate) struct HostList(pub(crate) Vec<String>);

pub(crate) fn host_list(text: &str) -> Result<HostList, String> {
    let names = expand(text, &mut MOST_NAMES.clone()).map_err(|error| error.to_string())?;
    let mut seen = BTreeSet::new();
    match names.iter().find(|name| !seen.insert(*name)) {
        Some(name) => Err(ImportErrorKind::Twice(name.clone()).to_string()),
        None => Ok(HostList(names)),
    }
}

/// Resources that all hosts have alike.
#[derive(Debug, clap::Args)]
struct Resources {
    /// CPU cores of each host [default: 0].
    #[arg(long, value_name = "N", value_parser = args::number::<u32>(args::ANY_U32))]
    cpus_per_node: Option<u32>,
    /// GPUs of each host, optionally by type, such as 8 or h100:8 [default: none].
    #[arg(long, value_name = "[TYPE:]N", value_parser = slurm::gpus)]
    gpus_per_node: Option<Gpus>,
}

/// GPUs by type.
pub(crate) type Gpus = BTreeMap<String, u32>;

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (file, mut import, common) = match &args.command {
        Command::Slurm { file, topology_name, resources, common } => {
            let import = read_topology(file, topology_name.as_deref())?;
            (file, resources.of(common.only(file, import)?), common)
        }
        Command::Topograph { file, name_label, resources, common } => {
            let import = topograph::read(&text_of(file)?, name_label.as_deref());
            let import = import.map_err(|error| wrong(file, error))?;
            (file, resources.of(common.only(file, import)?), common)
        }
        Command::Kubernetes { file, levels, common } => {
            let import = kubernetes::read(&text_of(file)?, levels);
            (file, common.only(file, import.map_err(|error| wrong(file, error))?)?, common)
        }
    };
    warn_of_notes(file, &mut import);
    let inventory = with_rates(&import, &common.nic_mbit, file)?;
    print_line(&match args.format {
        Output::Toml => toml_of(&inventory, file),
        Output::Json => serde_json::to_string_pretty(&inventory)
            .expect("an inventory has only numbers, and keys that are text"),
    })
}

impl Common {
    /// Returns an import with the hosts to print.
    fn only(&self, file: &Path, import: Import) -> Result<Import, Failure> {
        import.check_rates(&self.nic_mbit).map_err(|error| wrong(file, error))?;
        match &self.hosts {
            Some(HostList(names)) => import.only(names).map_err(|error| wrong(file, error)),
            None if import.hosts.is_empty() => {
                Err(wrong(file, "a flat topology lists no hosts; name them with --hosts"))
            }
            None => Ok(import),
        }
    }
}

impl Resources {
    /// Returns an import with these resources.
    fn of(&self, mut import: Import) -> Import {
        for host in &mut import.hosts {
            host.cpus = self.cpus_per_node.unwrap_or(0);
            host.gpus = self.gpus_per_node.clone().unwrap_or_default();
        }
        import
    }
}

/// Reads a topology file of Slurm, or the topology of a name in it.
pub(crate) fn read_topology(file: &Path, name: Option<&str>) -> Result<Import, Failure> {
    let is_yaml =
        file.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
    let format = if is_yaml { Format::Yaml } else { Format::Conf };
    let import = slurm::read(&text_of(file)?, format, name);
    import.map_err(|error| {
        let advice = match error.kind {
            ImportErrorKind::Ambiguous(_) => " with --topology-name",
            _ => "",
        };
        wrong(file, format_args!("{error}{advice}"))
    })
}

/// Returns the inventory of an import from a file, with these rates of network interfaces.
pub(crate) fn with_rates(
    import: &Import,
    rates: &[NicRate],
    file: &Path,
) -> Result<Inventory, Failure> {
    import.inventory(rates).map_err(|error| match error.kind {
        ImportErrorKind::Rate => {
            Failure::usage(PeerText::of(format_args!("{error} with --nic-mbit")).as_str())
        }
        _ => wrong(file, error),
    })
}

/// Warns of the decisions that the reader of a file took.
pub(crate) fn warn_of_notes(file: &Path, import: &mut Import) {
    for note in std::mem::take(&mut import.notes) {
        stderr::warn(format_args!("{}: {note}", file.display()));
    }
}

/// Returns an inventory as TOML, with comments on its origin.
fn toml_of(inventory: &Inventory, file: &Path) -> String {
    let hosts = counted(inventory.hosts.len(), "host");
    let file = PeerText::of(file.display());
    let text =
        toml::to_string(inventory).expect("an inventory has only numbers, and keys that are text");
    format!(
        "# {hosts} of {}, with levels widest first.\n# nic_mbit is what --nic-mbit or a label \
         said, not a measurement, and used resources are not known.\n{}",
        file.as_str(),
        text.trim_end()
    )
}
