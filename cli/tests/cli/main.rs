//! Tests of `racksum` as users run it: processes, files, exit codes, messages, and real network
//! namespaces where available.

#[cfg(test)]
mod cluster;
#[cfg(test)]
mod files;
#[cfg(test)]
#[path = "../../../tests/src/ports.rs"]
mod ports;
#[cfg(test)]
mod process;
#[cfg(test)]
mod tun;
#[cfg(test)]
#[path = "../../../tests/src/waits.rs"]
mod waits;

#[cfg(test)]
mod advice;
#[cfg(test)]
mod apply;
#[cfg(test)]
mod badwire;
#[cfg(test)]
mod chaos;
#[cfg(test)]
mod deaths;
#[cfg(test)]
mod environment;
#[cfg(test)]
mod failover;
#[cfg(test)]
mod host;
#[cfg(test)]
mod identity;
#[cfg(test)]
mod inventory;
#[cfg(test)]
mod learn;
#[cfg(test)]
mod moves;
#[cfg(test)]
mod namespaces;
#[cfg(test)]
mod noise;
#[cfg(test)]
mod paths;
#[cfg(test)]
mod place;
#[cfg(test)]
mod probe;
#[cfg(test)]
mod racks;
#[cfg(test)]
mod reduce;
#[cfg(test)]
mod refusals;
#[cfg(test)]
mod sidecar;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod slurm;
#[cfg(test)]
mod status;
#[cfg(test)]
mod terminal;
