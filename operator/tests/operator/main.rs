//! Tests of the operator against a stand-in for the API server.

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod standin;
#[cfg(test)]
mod world;

#[cfg(test)]
mod binary;
#[cfg(test)]
mod conditions;
#[cfg(test)]
mod failures;
#[cfg(test)]
mod following;
#[cfg(test)]
mod leaders;
#[cfg(test)]
mod orders;
#[cfg(test)]
mod placing;
#[cfg(test)]
mod rights;
#[cfg(test)]
mod rules;
#[cfg(test)]
mod standbys;
