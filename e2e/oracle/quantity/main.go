// Writes test vectors of parsing, formatting and arithmetic with resource.Quantity.
//
// `canonical` is CanonicalizeBytes, not String. String returns the parsed text if it looks canonical, so that "1.500"
// stays "1.500".
package main

import (
	"encoding/json"
	"fmt"
	"math/big"
	"math/rand"
	"os"
	"strings"

	inf "gopkg.in/inf.v0"
	"k8s.io/apimachinery/pkg/api/resource"
)

type parsed struct {
	In        string `json:"in"`
	OK        bool   `json:"ok"`
	Canonical string `json:"canonical,omitempty"`
	Format    string `json:"format,omitempty"`
	// The amount in nano-units.
	Nano string `json:"nano,omitempty"`
	// Value(), if it is in range and not negative (the library's two representations differ for negative amounts).
	Value string `json:"value,omitempty"`
}

type pair struct {
	A   string `json:"a"`
	B   string `json:"b"`
	Cmp int    `json:"cmp"`
	Sum string `json:"sum"`
	Dif string `json:"dif"`
}

func canonical(q resource.Quantity) string {
	number, suffix := q.CanonicalizeBytes(nil)
	return string(number) + string(suffix)
}

func nano(q resource.Quantity) *big.Int {
	d := q.DeepCopy()
	return new(inf.Dec).Round(d.AsDec(), 9, inf.RoundExact).UnscaledBig()
}

func read(text string) parsed {
	q, err := resource.ParseQuantity(text)
	if err != nil {
		return parsed{In: text}
	}
	n := nano(q)
	out := parsed{In: text, OK: true, Canonical: canonical(q.DeepCopy()), Format: string(q.Format), Nano: n.String()}
	whole, rest := new(big.Int).QuoRem(n, big.NewInt(1e9), new(big.Int))
	if n.Sign() >= 0 && new(big.Int).Add(whole, big.NewInt(int64(rest.Sign()))).IsInt64() {
		d := q.DeepCopy()
		out.Value = fmt.Sprint(d.Value())
	}
	return out
}

func compute(a, b string) pair {
	x, y := resource.MustParse(a), resource.MustParse(b)
	out := pair{A: a, B: b, Cmp: x.Cmp(y)}
	sum, dif := x.DeepCopy(), x.DeepCopy()
	sum.Add(y)
	dif.Sub(y)
	out.Sum, out.Dif = canonical(sum), canonical(dif)
	return out
}

func main() {
	numbers := []string{"0", "1", "5", "7", "10", "12", "100", "512", "999", "1000", "1024", "1500", "2048", "4096",
		"1000000", "1048576", "123456789", "0.1", "0.5", "1.5", "1.500", ".5", "1.", "0.001", "0.0000000001", "1.0000000001",
		"00012", "9223372036854775807", "9223372036854775808", "-1", "-1.5", "-0.5", "-1024", "+1", "-0", "+.5", "1.25"}
	suffixes := []string{"", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei",
		"e0", "e1", "e3", "E3", "e-3", "e+6", "e-10", "e9", "E-1"}
	odd := []string{"", "+", "-", ".", "-.", "Ki", "Ti", "Pi", "Ei", "+Ei", ".Ki", ".Pi", ".Ei", "m", "e5", "e-10", "k", "+k", "-Gi",
		"1e", "1E", "1e+", "1e-", "1ee5", "1eE5", "1e++5", "1e5.5", "1k5", "1K", "1ki", "1KI", "1mi", "1Mii", "1iM", "1i", "1 Gi", " 1", "1 ",
		"1,5", "1_000", "0x10", "1.2.3", "..", "--1", "+-1", "1-", "1+", "inf", "NaN", "1é", "é", "１", "1\x00", "1e99999999999999999999",
		"0e999", "0Ei", "-0Ei", "00.00", "0.000Ki", "1e20", "1e29", "123456789012345678901234567890",
		"170141183460469231731687303715", "0.123456789123456789", "-0.1n", "0.1n", "0.5n", "1.5n", "999999999999999999999n",
		"0.00000000000000000000000000000000000000000000000001", "1.00000000000000000000000000000000000000000000000000",
		"1.00000000000000000000000000000000000000000000000001Ki", "0.00000000000000000000000000000000000000000000000001Ei",
		"99999999999999999999999999999999999999999999999999Ki", "-99999999999999999999999999999999999999999999999999Ei",
		"7.999999999999999999Ei", "8Ei", "-8Ei", "16Ei", "1000E", "10000E", "1e21", "123e20", "1023Ki", "1024Ki", "1025Ki",
		"1023", "0.5Ki", "0.0005Ki", "1.0005Ki", "-0.5Mi", "79.25Gi", "0.3Gi", "100m", "1000m", "1001m", "e", "E", "i", "n", "1n1"}

	var reads []parsed
	seen := map[string]bool{}
	add := func(text string) {
		if !seen[text] {
			seen[text] = true
			reads = append(reads, read(text))
		}
	}
	for _, text := range odd {
		add(text)
	}
	for _, number := range numbers {
		for _, suffix := range suffixes {
			add(number + suffix)
		}
	}
	random := rand.New(rand.NewSource(1))
	digits := func(most int) string {
		var out strings.Builder
		for range random.Intn(most + 1) {
			out.WriteByte("00123456789"[random.Intn(11)])
		}
		return out.String()
	}
	for range 500 {
		text := []string{"", "", "", "-", "+"}[random.Intn(5)] + digits(22)
		if random.Intn(2) == 0 {
			text += "." + digits(25)
		}
		add(text + suffixes[random.Intn(len(suffixes))])
	}
	alphabet := "+-.0159eEinumkKMGTP"
	for range 300 {
		var text strings.Builder
		for range 1 + random.Intn(6) {
			text.WriteByte(alphabet[random.Intn(len(alphabet))])
		}
		add(text.String())
	}

	values := []string{"0", "0Ki", "0e1", "1", "-1", "1m", "1n", "-1500m", "1Ki", "1000", "1024", "1Gi", "1e3", "1e-9", "999E", "7Ei",
		"9223372036854775807", "-9223372036854775807", "0.3Gi", "1.5", "80Gi", "-80Gi", "100M"}
	var pairs []pair
	for _, a := range values {
		for _, b := range values {
			pairs = append(pairs, compute(a, b))
		}
	}

	write := func(name string, count int, row func(int) any, last bool) {
		fmt.Printf("  %q: [\n", name)
		for i := range count {
			text, err := json.Marshal(row(i))
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			comma := ","
			if i == count-1 {
				comma = ""
			}
			fmt.Printf("    %s%s\n", text, comma)
		}
		if last {
			fmt.Println("  ]")
		} else {
			fmt.Println("  ],")
		}
	}
	fmt.Println("{")
	write("parse", len(reads), func(i int) any { return reads[i] }, false)
	write("arithmetic", len(pairs), func(i int) any { return pairs[i] }, true)
	fmt.Println("}")
}
