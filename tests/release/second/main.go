// A second implementation of a registry: the one of go-containerregistry, in memory, with the referrers API of OCI 1.1.
package main

import (
	"log"
	"net/http"
	"os"

	"github.com/google/go-containerregistry/pkg/registry"
)

func main() {
	log.Fatal(http.ListenAndServe(os.Args[1], registry.New(registry.WithReferrersSupport(true))))
}
