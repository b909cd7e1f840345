// The process that holds a pod's namespaces, built by ../build.sh.
module tollkeeper.test/pause

go 1.24.0
