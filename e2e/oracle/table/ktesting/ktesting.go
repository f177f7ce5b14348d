// Package ktesting has the part of k8s.io/ktesting that the table of Kubernetes 1.38 uses. The Go module proxy refuses that
// module; remove this one when it is available.
package ktesting

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/onsi/gomega"
)

// TContext is the context of a test.
type TContext struct {
	context.Context
	*testing.T
	gomega gomega.Gomega
	cancel context.CancelCauseFunc
}

// SetDefaultVerbosity does nothing, because nothing is logged.
func SetDefaultVerbosity(int) {}

// Init returns the context of a test.
func Init(t *testing.T) TContext {
	return TContext{Context: context.Background(), T: t, gomega: gomega.NewWithT(t)}
}

// Run runs a test within this one.
func (c TContext) Run(name string, test func(TContext)) bool {
	return c.T.Run(name, func(t *testing.T) { test(Init(t)) })
}

// Deadline is that of the context, not of the test.
func (c TContext) Deadline() (time.Time, bool) { return c.Context.Deadline() }

// Require fails the test if the value does not match.
func (c TContext) Require(actual any) gomega.Assertion { return c.gomega.Expect(actual) }

// Expect is the same as Require.
func (c TContext) Expect(actual any) gomega.Assertion { return c.gomega.Expect(actual) }

// ExpectNoError fails the test if there is an error.
func (c TContext) ExpectNoError(err error) { c.gomega.Expect(err).NotTo(gomega.HaveOccurred()) }

// WithTimeout returns a context with a timeout.
func (c TContext) WithTimeout(timeout time.Duration, cause string) TContext {
	return c.WithDeadline(time.Now().Add(timeout), cause)
}

// WithDeadline returns a context with a deadline.
func (c TContext) WithDeadline(deadline time.Time, cause string) TContext {
	ctx, cancel := context.WithDeadlineCause(c.Context, deadline, fmt.Errorf("%s: %w", cause, context.DeadlineExceeded))
	c.T.Cleanup(cancel)
	c.Context = ctx
	return c
}

// WithCancel returns a context that Cancel ends.
func (c TContext) WithCancel() TContext {
	c.Context, c.cancel = context.WithCancelCause(c.Context)
	return c
}

// Cancel ends the context.
func (c TContext) Cancel(cause string) { c.cancel(fmt.Errorf("%s: %w", cause, context.Canceled)) }
